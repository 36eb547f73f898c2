"""What an outcome is worth: the zero-inflated log-normal (1912.07753).

B batch, H hidden width, O objectives.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEAST = 1e-3  # of the deviation, so that equal values do not make it a point
MOST = 5.0  # of it; e^12 between the median and the mean


@dataclass(frozen=True)
class Worth:
    """ln(value) of an outcome, if it comes, is normal: `mean` and `deviation` (B, O)."""

    mean: Tensor
    deviation: Tensor

    def expected(self, logits: Tensor) -> Tensor:
        """The mean value (B, O) of an impression: P(outcome) exp(mean + deviation² / 2)."""
        return torch.sigmoid(logits) * torch.exp(self.mean + self.deviation.square() / 2)

    def loss(self, values: Tensor) -> Tensor:
        """-ln of the density of values (B, O) above 0, by value; 0 for the others."""
        there = values > 0
        told = torch.where(there, values, 1.0).log()
        each = F.gaussian_nll_loss(self.mean, told, self.deviation.square(), reduction="none")
        return torch.where(there, each, 0.0)


class ValueHead(nn.Module):
    """The worth of outcomes, from a row's embedding; only of objectives whose values are told."""

    valued: Tensor

    def __init__(self, hidden: int, objectives: Sequence[str], valued: Sequence[str]) -> None:
        super().__init__()
        self.out = nn.Linear(hidden, 2 * len(objectives))
        told = torch.tensor([name in valued for name in objectives])
        self.register_buffer("valued", told, persistent=False)

    def forward(self, h: Tensor) -> Worth:
        """(B, H) to the worth of each objective; values that are not told cost nothing."""
        mean, deviation = self.out(h).chunk(2, 1)
        return Worth(mean, F.softplus(deviation).clamp(LEAST, MOST))
