"""Output heads: logits by surface and objective, the ESMM chain, and outcome values.

B batch, H hidden width, S surfaces, O objectives.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from etl.errors import UserError


class DomainGate(nn.Module):
    """Gate by surface, h * 2 sigmoid(MLP([surface ; stop_gradient(h)])) (PEPNet, 2302.01115)."""

    def __init__(self, surfaces: int, hidden: int, width: int = 16) -> None:
        super().__init__()
        self.surface = nn.Embedding(surfaces + 1, width)
        self.mlp = nn.Sequential(
            nn.Linear(width + hidden, hidden // 2), nn.ReLU(), nn.Linear(hidden // 2, hidden)
        )

    def forward(self, h: Tensor, surface: Tensor) -> Tensor:
        """(B, H) to (B, H)."""
        gate_input = torch.cat((self.surface(surface), h.detach()), 1)
        return h * 2 * torch.sigmoid(self.mlp(gate_input))


class SurfaceHeads(nn.Module):
    """A shared linear head for each objective, plus a correction by surface that starts at zero."""

    def __init__(self, surfaces: int, objectives: int, hidden: int) -> None:
        super().__init__()
        self.shared = nn.Linear(hidden, objectives)
        self.surface_weight = nn.Parameter(torch.zeros(surfaces + 1, objectives, hidden))
        self.surface_bias = nn.Parameter(torch.zeros(surfaces + 1, objectives))
        nn.init.constant_(self.shared.bias, -2.0)

    def forward(self, h: Tensor, surface: Tensor) -> Tensor:
        """Hidden units (B, H) and surface codes (B) to logits (B, O)."""
        correction = torch.einsum("bh,boh->bo", h, self.surface_weight[surface])
        logits: Tensor = self.shared(h) + correction + self.surface_bias[surface]
        return logits


class EsmmChain(nn.Module):
    """P(conversion) = P(click) P(conversion | click), trained on all rows (ESMM, 1804.07931).

    `parents` maps an objective to the one that must precede it; the head of an objective with a
    parent computes the logit of the conditional probability. Raises UserError for an unknown name
    or a cycle.
    """

    def __init__(self, objectives: Sequence[str], parents: Mapping[str, str]) -> None:
        super().__init__()
        unknown = sorted({*parents, *parents.values()} - set(objectives))
        if unknown:
            raise UserError(
                f"--model.esmm-parents names {', '.join(unknown)}; "
                f"objectives are {', '.join(objectives)}"
            )
        column = {name: number for number, name in enumerate(objectives)}
        self.child_parent_columns = [
            (column[name], column[parents[name]]) for name in _topological_order(parents)
        ]

    def forward(self, logits: Tensor) -> Tensor:
        """Conditional logits (B, O) to unconditional ones."""
        columns = list(logits.unbind(1))
        for child, parent in self.child_parent_columns:
            columns[child] = joint_logit(columns[parent], columns[child])
        return torch.stack(columns, 1)


def joint_logit(a: Tensor, b: Tensor) -> Tensor:
    """Logit of sigmoid(a) sigmoid(b), numerically stable: -ln(e^-a + e^-b + e^-(a+b))."""
    return -torch.logsumexp(torch.stack((-a, -b, -a - b)), 0)


def _topological_order(parents: Mapping[str, str]) -> list[str]:
    """Objectives that have a parent, each after its parent."""
    ordered: list[str] = []
    for child in parents:
        chain: list[str] = []
        name = child
        while name in parents and name not in ordered:
            if name in chain:
                raise UserError(f"--model.esmm-parents has a cycle: {' after '.join(chain)}")
            chain.append(name)
            name = parents[name]
        ordered += reversed(chain)
    return ordered


MIN_LOG_STD = 1e-3  # keeps the likelihood finite if all values are equal
MAX_LOG_STD = 5.0  # limits the mean to e^12.5 times the median


@dataclass(frozen=True)
class ZilnDistribution:
    """Zero-inflated log-normal distribution: ln(value) of an outcome is normal, if it occurs.

    `log_mean` and `log_std` are the parameters of that normal distribution (B, O).
    """

    log_mean: Tensor
    log_std: Tensor

    def expected_value(self, logits: Tensor) -> Tensor:
        """Expected value (B, O) of an impression: P(outcome) exp(log_mean + log_std² / 2)."""
        return torch.sigmoid(logits) * torch.exp(self.log_mean + self.log_std.square() / 2)

    def negative_log_likelihood(self, values: Tensor) -> Tensor:
        """Negative log-likelihood of positive values (B, O), without constants; 0 for others."""
        positive = values > 0
        log_values = torch.where(positive, values, 1.0).log()
        loss = F.gaussian_nll_loss(
            self.log_mean, log_values, self.log_std.square(), reduction="none"
        )
        return torch.where(positive, loss, 0.0)


class ZilnValueHead(nn.Module):
    """Predicts outcome values from an embedding (ZILN, 1912.07753)."""

    def __init__(self, hidden: int, objectives: int) -> None:
        super().__init__()
        self.out = nn.Linear(hidden, 2 * objectives)

    def forward(self, h: Tensor) -> ZilnDistribution:
        """Embeddings (B, H) to the distribution of each objective's value (B, O)."""
        log_mean, raw_std = self.out(h).chunk(2, 1)
        return ZilnDistribution(log_mean, F.softplus(raw_std).clamp(MIN_LOG_STD, MAX_LOG_STD))
