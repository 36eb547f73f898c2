"""Dense features as rows. B batch, F numbers, d width."""

import torch
from torch import Tensor, nn


class RunningScale(nn.Module):
    """Numbers (B, F) less their running mean, over their running deviation; NaN becomes 0.

    The same in training and in serving: a batch is scaled by what was seen up to and with it.
    """

    mean: Tensor
    variance: Tensor
    seen: Tensor

    def __init__(self, numbers: int, most: float = 20_000) -> None:
        super().__init__()
        self.most = most
        self.register_buffer("mean", torch.zeros(numbers))
        self.register_buffer("variance", torch.ones(numbers))
        self.register_buffer("seen", torch.zeros(numbers))

    def forward(self, numbers: Tensor) -> Tensor:
        """(B, F) to (B, F), within six deviations."""
        if self.training:
            self._update(numbers)
        scaled = (numbers - self.mean) * torch.rsqrt(self.variance + 1e-6)
        return scaled.nan_to_num(0.0).clamp(-6, 6)

    @torch.no_grad()
    def _update(self, numbers: Tensor) -> None:
        """Mean and variance over the last `most` numbers or so (Chan's parallel formula)."""
        there = (~numbers.isnan()).sum(0)
        fresh = numbers.nanmean(0).nan_to_num(0.0)
        spread = ((numbers - fresh) ** 2).nanmean(0).nan_to_num(0.0)
        share = there / (self.seen + there).clamp(min=1)
        step = fresh - self.mean
        self.variance += share * (spread - self.variance + (1 - share) * step**2)
        self.mean += share * step
        self.seen.copy_((self.seen + there).clamp(max=self.most))


class NumericRows(nn.Module):
    """Numbers (B, F), NaN where missing, to `rows` rows of width d."""

    def __init__(self, numbers: int, rows: int, width: int, hidden: int) -> None:
        super().__init__()
        self.scale = RunningScale(numbers)
        self.mlp = nn.Sequential(
            nn.Linear(2 * numbers, hidden), nn.ReLU(), nn.Linear(hidden, rows * width)
        )
        self.rows = rows

    def forward(self, numbers: Tensor) -> Tensor:
        """(B, F) to (B, rows, d); a missing number is the mean, and flagged."""
        known = torch.cat((self.scale(numbers), numbers.isnan().float()), 1)
        return self.mlp(known).view(len(numbers), self.rows, -1)
