"""The trunk of GEM: an MLP that reads the rows of the interactions and the wide inputs."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from training.model.config import TrunkNorm
from training.model.low_precision import BlockNorm, SwishRMSNorm

ALIGNED_WIDTH = 8  # elements of bf16 in 16 bytes, the alignment that tensor cores need


class AlignedLinear(nn.Linear):
    """A linear layer that pads its inputs with zeros on a GPU, if their width is not aligned.

    Matrix products of rows that are not aligned to 16 bytes are several times slower there.
    """

    @override
    def forward(self, input: Tensor) -> Tensor:
        """X W^T + b, as by `torch.nn.Linear`."""
        if input.is_cuda and self.in_features % ALIGNED_WIDTH:
            return aligned_linear(input, self.weight, self.bias)
        return super().forward(input)


def aligned_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """X W^T + b, computed with inputs and weights padded to a multiple of ALIGNED_WIDTH."""
    padding = 0, -x.shape[-1] % ALIGNED_WIDTH
    return F.linear(F.pad(x, padding), F.pad(weight, padding), bias)


def build_trunk(
    inputs: int, widths: Sequence[int], dropout: float, norm: TrunkNorm = "layer"
) -> nn.Sequential:
    """Linear layers of some widths, each with a norm, an activation and dropout."""
    layers: list[nn.Module] = []
    for width in widths:
        layers.append(AlignedLinear(inputs, width))
        if norm == "swish_rms":
            layers.append(SwishRMSNorm(width))
        else:
            layers += [nn.LayerNorm(width) if norm == "layer" else BlockNorm(), nn.ReLU()]
        layers.append(nn.Dropout(dropout))
        inputs = width
    return nn.Sequential(*layers)
