"""Dense features as rows. B batch, F numbers, d width, H hidden width."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RunningScale(nn.Module):
    """Numbers (B, F) less their running mean, over their running deviation.

    What is missing, NaN, becomes 0, and so does what is infinite.
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
        there = numbers.isfinite()
        if self.training:
            self._update(torch.where(there, numbers, torch.nan))
        scaled = (numbers - self.mean) * torch.rsqrt(self.variance + 1e-6)
        return torch.where(there, scaled, 0.0).clamp(-6, 6)

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


BINS, REACH = 16, 3.0  # of a scaled number, from -3 to 3 deviations


class NumericRows(nn.Module):
    """Numbers (B, F), NaN where missing, to `rows` rows of width d.

    Beside a linear layer each number adds the learned vector of the bin that it falls in, from
    zero: steps, as trees have them, where a line does not fit (binned numeric embeddings, as in
    2203.05556).
    """

    first_bin: Tensor

    def __init__(self, numbers: int, rows: int, width: int, hidden: int) -> None:
        super().__init__()
        self.scale = RunningScale(numbers)
        self.linear = nn.Linear(2 * numbers, hidden)
        self.bins = nn.Parameter(torch.zeros(max(1, numbers) * BINS, hidden))
        self.out = nn.Linear(hidden, rows * width)
        self.rows = rows
        self.register_buffer("first_bin", torch.arange(numbers) * BINS, persistent=False)

    def forward(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """(B, F) to (B, rows, d), and scaled (B, F); a missing number is the mean, and flagged."""
        scaled = self.scale(numbers)
        h = self.linear(torch.cat((scaled, (~numbers.isfinite()).float()), 1))
        if numbers.shape[1]:
            own_bin = ((scaled + REACH) * (BINS / (2 * REACH))).long().clamp(0, BINS - 1)
            h = h + F.embedding_bag(own_bin + self.first_bin, self.bins, mode="sum")
        return self.out(torch.relu(h)).unflatten(1, (self.rows, -1)), scaled
