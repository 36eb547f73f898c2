"""Counts and positive rates of the values of fields and of pairs of fields.

Trees find them by splitting; a network that learns an embedding for each value needs many more
rows. The statistics of a training row are those of the other folds, so that its own label is not in
them; rows of other files use all training rows.

B rows, F fields, K keys: F fields and their pairs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from etl.array_types import Float32, Float64, Floats, Int64

FOLDS = 10
PRIOR_COUNT = 10.0  # rows at the rate of all rows that are added to each value
MAX_PAIRED_FIELDS = 24  # with more fields there are no pairs


@dataclass(frozen=True)
class TargetStatistics:
    """Training rows: ids (B, F) below `sizes` (F), labels (B) and folds (B)."""

    sizes: tuple[int, ...]
    ids: Int64
    labels: Float64
    folds: Int64

    @classmethod
    def of(
        cls, sizes: tuple[int, ...], ids: Int64, labels: Floats, seed: int = 0
    ) -> "TargetStatistics":
        """Statistics of training rows, in random folds."""
        folds = np.random.default_rng(seed).integers(0, FOLDS, len(ids))
        return cls(sizes, ids, labels.astype(np.float64), folds)

    def of_training_rows(self) -> Float32:
        """Log counts and logits of rates (B, 2 K) of the training rows, out of fold."""
        columns = []
        for key in self._keys(self.ids):
            _, value = np.unique(key, return_inverse=True)
            count, positive = self._sums(value) - self._sums_of_own_fold(value)
            columns.append(self._columns(*(FOLDS / (FOLDS - 1) * x for x in (count, positive))))
        return np.concatenate(columns, 1).astype(np.float32)

    def __call__(self, ids: Int64) -> Float32:
        """Log counts and logits of rates (B, 2 K) of other rows; values not in training have 0."""
        columns = []
        for key, rows in zip(self._keys(self.ids), self._keys(ids), strict=True):
            values, first, value = np.unique(key, return_index=True, return_inverse=True)
            position = np.searchsorted(values, rows).clip(max=len(values) - 1)
            sums = self._sums(value)[:, first[position]] * (values[position] == rows)
            columns.append(self._columns(*sums))
        return np.concatenate(columns, 1).astype(np.float32)

    def _keys(self, ids: Int64) -> Iterator[Int64]:
        """The K keys of rows (B): each field, then each pair of fields."""
        fields = range(len(self.sizes))
        yield from (ids[:, field] for field in fields)
        if len(self.sizes) <= MAX_PAIRED_FIELDS:
            for a, b in combinations(fields, 2):
                yield ids[:, a] * self.sizes[b] + ids[:, b]

    def _sums(self, value: Int64) -> Float64:
        """Rows and positives (2, B) of the value of each training row."""
        sums = np.stack((np.bincount(value), np.bincount(value, self.labels)))
        return np.asarray(sums[:, value], np.float64)

    def _sums_of_own_fold(self, value: Int64) -> Float64:
        """The same (2, B), of the rows of the same fold alone."""
        return self._sums(np.unique(value * FOLDS + self.folds, return_inverse=True)[1])

    def _columns(self, count: Float64, positive: Float64) -> Float64:
        """Log count and logit of the smoothed rate (B, 2)."""
        prior = (self.labels.sum() + 0.5) / (len(self.labels) + 1)
        rate = (positive + PRIOR_COUNT * prior) / (count + PRIOR_COUNT)
        return np.stack((np.log1p(count), np.log(rate / (1 - rate))), 1)
