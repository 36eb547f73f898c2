"""Numeric features: running standardization, binning, and rows. B batch, F features, d width."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RunningStandardizer(nn.Module):
    """Standardizes values (B, F) by running mean and variance; NaN and infinite values become 0.

    In training the statistics are updated with a batch before it is scaled, so training and serving
    apply the same formula.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, num_features: int, max_count: float = 20_000) -> None:
        super().__init__()
        self.max_count = max_count
        self.register_buffer("mean", torch.zeros(num_features))
        self.register_buffer("variance", torch.ones(num_features))
        self.register_buffer("count", torch.zeros(num_features))

    def forward(self, values: Tensor) -> Tensor:
        """(B, F) to (B, F), clipped to six standard deviations."""
        finite = values.isfinite()
        if self.training:
            self._update(torch.where(finite, values, torch.nan))
        scaled = (values - self.mean) * torch.rsqrt(self.variance + 1e-6)
        return torch.where(finite, scaled, 0.0).clamp(-6, 6)

    @torch.no_grad()
    def _update(self, values: Tensor) -> None:
        """Merge the statistics of a batch (Chan's parallel formula); NaN is not counted.

        The count is capped at `max_count`, which makes the statistics a moving average.
        """
        count = (~values.isnan()).sum(0)
        mean = values.nanmean(0).nan_to_num(0.0)
        variance = ((values - mean) ** 2).nanmean(0).nan_to_num(0.0)
        weight = count / (self.count + count).clamp(min=1)
        delta = mean - self.mean
        self.variance += weight * (variance - self.variance + (1 - weight) * delta**2)
        self.mean += weight * delta
        self.count.copy_((self.count + count).clamp(max=self.max_count))


BINS, BIN_RANGE = 16, 3.0  # equal bins from -3 to 3 standard deviations


class NumericRows(NamedTuple):
    """`rows` (B, rows, d) for the interaction module, and the `standardized` values (B, F)."""

    rows: Tensor
    standardized: Tensor


class NumericEmbedding(nn.Module):
    """Values (B, F), NaN where missing, to `rows` rows of width d, by an MLP.

    The first linear layer adds a learned vector of each value's bin, initialized with zeros: a
    piecewise constant function, as in trees (binned numeric embeddings, 2203.05556).
    """

    bin_offsets: Tensor

    def __init__(self, num_features: int, rows: int, width: int, hidden: int) -> None:
        super().__init__()
        self.standardizer = RunningStandardizer(num_features)
        self.linear = nn.Linear(2 * num_features, hidden)
        self.bins = nn.Parameter(torch.zeros(max(1, num_features) * BINS, hidden))
        self.out = nn.Linear(hidden, rows * width)
        self.rows = rows
        self.register_buffer("bin_offsets", torch.arange(num_features) * BINS, persistent=False)

    def forward(self, values: Tensor) -> NumericRows:
        """Rows and standardized values; a missing value counts as the mean and is flagged."""
        scaled = self.standardizer(values)
        h = self.linear(torch.cat((scaled, (~values.isfinite()).float()), 1))
        if values.shape[1]:
            bins = ((scaled + BIN_RANGE) * (BINS / (2 * BIN_RANGE))).long().clamp(0, BINS - 1)
            h = h + F.embedding_bag(bins + self.bin_offsets, self.bins, mode="sum")
        return NumericRows(self.out(torch.relu(h)).unflatten(1, (self.rows, -1)), scaled)
