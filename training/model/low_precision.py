"""Changes of the model that make low precision cheaper: LoKA's Mods (2605.10886), as options.

B rows, W width.
"""

import torch
from torch import Tensor, nn

BLOCK_WIDTH = 256  # outputs that a kernel normalizes while it writes them
NORM_EPS = 1e-6
PREDICTION_LAYERS = ("heads", "value_head")


class BlockNorm(nn.Module):
    """Root mean square norm of blocks of BLOCK_WIDTH outputs (B, W), without parameters.

    It is the same in training and in serving; the last block may be narrower.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Each block divided by its root mean square."""
        blocks = x.split(BLOCK_WIDTH, -1)
        norms = [(b.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt() for b in blocks]
        return torch.cat([b * norm for b, norm in zip(blocks, norms, strict=True)], -1)


class SwishRMSNorm(nn.Module):
    """x * sigmoid(RMSNorm(x)): norm and activation in one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=NORM_EPS)
        self.activation = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        """The activations (…, W)."""
        gated: Tensor = x * self.activation(self.norm(x))
        return gated


def remove_biases(model: nn.Module) -> None:
    """Remove the biases of all linear layers but those of prediction layers."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not name.startswith(PREDICTION_LAYERS):
            module.register_parameter("bias", None)


def harden_gates(model: nn.Module) -> None:
    """Replace the modules Swish by HardSwish and Sigmoid by HardSigmoid, in place.

    Activations of attention scores stay: the kernels that compute them do not store them.
    """
    hard = {nn.SiLU: nn.Hardswish, nn.Sigmoid: nn.Hardsigmoid}
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) in hard:
                setattr(module, name, hard[type(child)]())
