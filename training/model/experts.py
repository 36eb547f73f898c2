"""Experts between the trunk and the towers: MMoE (KDD 2018) and PLE (RecSys 2020).

B batch, H hidden width, O objectives with auxiliary ones, K experts of all objectives, S experts of
a single one, W width of an expert.
"""

import torch
from torch import Tensor, nn

from training.model.config import GemConfig


class Experts(nn.Module):
    """sum_k g_ok f_k(h) for each objective o, with f(h) = ReLU(W h + b) and g_o = softmax(G_o h).

    MMoE has `shared` experts alone. PLE also has `specific` experts of each objective, which its
    gate alone reads (customized gate control, one level): they are trained by the loss of their
    objective only. A second level would mix them, because its shared experts read all of the first.
    """

    def __init__(
        self, objectives: int, hidden: int, width: int, shared: int, specific: int
    ) -> None:
        super().__init__()
        self.shared, self.specific = shared, specific
        scale = hidden**-0.5
        self.shared_weight = nn.Parameter(torch.empty(shared, hidden, width))
        self.shared_bias = nn.Parameter(torch.zeros(shared, width))
        self.specific_weight = nn.Parameter(torch.empty(objectives, specific, hidden, width))
        self.specific_bias = nn.Parameter(torch.zeros(objectives, specific, width))
        self.gate = nn.Parameter(torch.empty(objectives, hidden, shared + specific))
        for weight in (self.shared_weight, self.specific_weight, self.gate):
            nn.init.uniform_(weight, -scale, scale)

    def gates(self, h: Tensor) -> Tensor:
        """Weights (B, O, K + S) of the shared experts, then of those of the objective."""
        return torch.einsum("bh,ohk->bok", h, self.gate).softmax(2)

    def forward(self, h: Tensor) -> Tensor:
        """Hidden units (B, H) to the mixture (B, O, W) of each objective."""
        gates = self.gates(h)
        shared = torch.relu(torch.einsum("bh,khw->bkw", h, self.shared_weight) + self.shared_bias)
        mixture: Tensor = gates[:, :, : self.shared] @ shared
        if not self.specific:
            return mixture
        own = torch.relu(
            torch.einsum("bh,oshw->bosw", h, self.specific_weight) + self.specific_bias
        )
        return mixture + torch.einsum("bos,bosw->bow", gates[:, :, self.shared :], own)


def expert_width(config: GemConfig) -> int:
    """The width W of an expert."""
    return config.mlp_width // 2


def build_experts(objectives: int, config: GemConfig) -> Experts | None:
    """The experts of a configuration, if any, for a number of objectives with auxiliary ones."""
    if config.experts == "none":
        return None
    specific = config.num_experts if config.experts == "ple" else 0
    width = expert_width(config)
    return Experts(objectives, config.mlp_width, width, config.num_experts, specific)
