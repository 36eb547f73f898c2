"""Sizes of segments from counts of pairs of values: a log-linear model without three-way terms.

For values a_1 ... a_K of K attributes, with the shares of single values and of pairs known:

    P(a_1, ..., a_K) = prod_{i < j} P(a_i, a_j) / prod_i P(a_i)^(K - 2)

It is exact for one or two attributes. For more, the size of a segment is taken to vary around the
expected size M with variance M + `dispersion` M^2: as a Poisson count does, and as far as values
interact in threes, which the sample shows.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from etl.array_types import Float64, Int64
from ranking.forecast.conditions import Box, Value
from ranking.forecast.sums import Prior

MAX_VALUES = 100  # of an attribute, the most frequent, whose combinations show the model's errors
MIN_EXPECTED = 1.0  # cells of fewer expected users say nothing about errors of the model


@dataclass(frozen=True)
class PairCounts:
    """Counts of all pairs of values: of impressions, or of users.

    Attributes:
        rows: By attribute and value, its row and column in `counts`.
        counts: Counts (V, V) of V values; the diagonal has those of single values.
        total: The count of all.
    """

    rows: Mapping[str, Mapping[Value, int]]
    counts: Float64
    total: float

    def expected(self, box: Box) -> float | None:
        """The expected count of a combination of values; None if it names other attributes."""
        if not box:
            return self.total
        if not set(box) <= set(self.rows):
            return None
        chosen = [[self.rows[name][value] for value in allowed] for name, allowed in box.items()]
        singles = [self.counts[rows, rows].sum() for rows in chosen]
        if len(box) == 1:
            return float(singles[0])
        pairs = [
            self.counts[np.ix_(a, b)].sum() for a, b in itertools.combinations(chosen, 2)
        ]  # fmt: skip
        return float(_kirkwood(np.array(singles), np.array(pairs), self.total))


def _kirkwood(singles: Float64, pairs: Float64, total: float) -> Float64:
    """The model of the module's docstring for counts of singles (K, …) and of pairs (…)."""
    with np.errstate(divide="ignore"):
        log_share = np.log(pairs / total).sum(0) - (len(singles) - 2) * np.log(singles / total).sum(
            0
        )
    share = np.exp(np.where(np.isnan(log_share), -np.inf, log_share))
    return np.asarray(np.minimum(total * share, pairs.min(0)))


@dataclass(frozen=True)
class LogLinearModel:
    """Expected impressions and users of combinations of values, with the variance of the errors.

    `impressions_per_user` is weighted by impressions: what one more user adds to the variance of
    impressions over what it adds to their mean.
    """

    impressions: PairCounts
    users: PairCounts
    dispersion: float
    impressions_per_user: float

    def impressions_prior(self, box: Box) -> Prior | None:
        """What to expect of the impressions in a segment; None if no counts cover it."""
        return self._prior(self.impressions.expected(box), box, self.impressions_per_user)

    def users_prior(self, box: Box) -> Prior | None:
        """What to expect of the users in a segment; None if it is not one of users."""
        return self._prior(self.users.expected(box), box, 1.0)

    def _prior(self, mean: float | None, box: Box, unit: float) -> Prior | None:
        if mean is None:
            return None
        is_exact = len(box) <= 2
        return Prior(mean, 0.0 if is_exact else unit * mean + self.dispersion * mean**2)


def pair_counts(
    margins: pa.Table, column: str, domain: Mapping[str, Sequence[Value]]
) -> PairCounts:
    """The counts of a column of `forecast_margins`; pairs without a count are left out.

    Args:
        margins: Rows of the table.
        column: `impressions` or `users`.
        domain: The values of each attribute.
    """
    counted = margins.filter(margins[column].is_valid())
    named = [name for name in domain if name in set(counted["attribute_a"].to_pylist())]
    rows: dict[str, dict[Value, int]] = {}
    position = itertools.count()
    for name in named:
        rows[name] = {value: next(position) for value in domain[name]}
    size = sum(map(len, rows.values()))
    counts = np.zeros((size, size))
    texts = {(name, str(value)): row for name, by in rows.items() for value, row in by.items()}
    columns = ("attribute_a", "value_a", "attribute_b", "value_b", column)
    values = zip(*(counted[name].to_pylist() for name in columns), strict=True)
    for name_a, value_a, name_b, value_b, count in values:
        a, b = texts[name_a, value_a], texts[name_b, value_b]
        counts[a, b] = counts[b, a] = count
    first = rows[named[0]] if named else {}
    total = float(sum(counts[row, row] for row in first.values()))
    return PairCounts(rows, counts, total)


def fit_log_linear(
    impressions: PairCounts,
    users: PairCounts,
    values: Mapping[str, Int64],
    weights: Float64,
    user_impressions: Float64,
) -> LogLinearModel:
    """The model, with its errors estimated on all combinations of three attributes of users.

    Of attributes with many values, the `MAX_VALUES` most frequent are combined: others have few
    users in a combination, and all combinations may not fit in memory.

    Args:
        impressions: Counts of impressions.
        users: Counts of users.
        values: The row in `users` of each sampled user's value (N), by attribute.
        weights: 1 / probability of each sampled user (N).
        user_impressions: Impressions of each sampled user (N).
    """
    products, norms = 0.0, 0.0
    for triple in itertools.combinations(users.rows, 3):
        expected, cell = _triple_cells(users, triple, values)
        is_in_cell = cell >= 0
        chosen, cell = weights[is_in_cell], cell[is_in_cell]
        total = np.bincount(cell, chosen, expected.size)
        sampling_variance = np.bincount(cell, chosen * (chosen - 1.0), expected.size)
        excess = (total - expected) ** 2 - sampling_variance - expected
        is_large = expected >= MIN_EXPECTED
        mean, excess = expected[is_large], excess[is_large]
        # Least squares of the excess on mean^2, each cell over the variance of its squared error.
        scale = 1.0 / (mean * weights.mean() + (0.2 * mean) ** 2) ** 2
        products += float((scale * excess * mean**2).sum())
        norms += float((scale * mean**4).sum())
    weighted = weights * user_impressions
    # One standard error is added to the dispersion: one too small makes intervals too narrow.
    return LogLinearModel(
        impressions,
        users,
        dispersion=max(products / norms, 0.0) + (2.0 / norms) ** 0.5 if norms else 0.0,
        impressions_per_user=float((weighted * user_impressions).sum() / weighted.sum()),
    )


def _triple_cells(
    users: PairCounts, names: Sequence[str], values: Mapping[str, Int64]
) -> tuple[Float64, Int64]:
    """Expected users of combinations of three attributes, and that of each sampled user, or -1."""
    rows = [_most_frequent(users, name) for name in names]
    grid = [array.ravel() for array in np.meshgrid(*rows, indexing="ij")]
    singles = np.stack([users.counts[r, r] for r in grid])
    pairs = np.stack([users.counts[a, b] for a, b in itertools.combinations(grid, 2)])
    cell = np.zeros(len(values[names[0]]), np.int64)
    is_in_cell = np.ones(len(cell), bool)
    for name, chosen in zip(names, rows, strict=True):
        position = np.full(len(users.counts), -1)
        position[chosen] = np.arange(len(chosen))
        found = position[values[name]]
        cell, is_in_cell = cell * len(chosen) + found, is_in_cell & (found >= 0)
    return _kirkwood(singles, pairs, users.total), np.where(is_in_cell, cell, -1)


def _most_frequent(users: PairCounts, name: str) -> Int64:
    """The rows of an attribute's most frequent values, at most `MAX_VALUES`."""
    rows = np.fromiter(users.rows[name].values(), np.int64)
    return rows[np.argsort(-users.counts[rows, rows], kind="stable")[:MAX_VALUES]]
