"""Differences of NE between models, and their calibration, over users drawn with replacement.

B rows of U users.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import bootstrap

from training.predictions import Predictions

Floats = npt.NDArray[np.float64]
ETA = 1e-12
RESAMPLES = 1000
AT_ONCE = 100  # resamples


@dataclass(frozen=True)
class Interval:
    """A number, and the bounds between which it lies in 95 of 100 cases."""

    value: float
    low: float
    high: float

    @property
    def sure(self) -> bool:
        """Whether it is not zero."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        """In ten-thousandths, as differences of NE are small."""
        value, low, high = (1e4 * x for x in (self.value, self.low, self.high))
        return f"{value:+.0f} [{low:+.0f}, {high:+.0f}]"


def apart(
    ours: Sequence[Predictions], theirs: Sequence[Predictions], objective: str, seed: int = 0
) -> Interval:
    """NE of our seeds less that of theirs, means over seeds, on all rows that have a label.

    Users are drawn, as the rows of one are alike (paired bootstrap, percentiles). All predictions
    are of the same rows.
    """
    sums = by_user([*ours, *theirs], objective)
    n = len(ours)
    data = (sums[:, :n].mean(1), sums[:, n:-2].mean(1), sums[:, -2], sums[:, -1])
    found = bootstrap(
        data, difference, paired=True, vectorized=True, n_resamples=RESAMPLES, batch=AT_ONCE,
        method="percentile", rng=np.random.default_rng(seed),
    )  # fmt: skip
    low, high = found.confidence_interval
    return Interval(float(difference(*data)), float(low), float(high))


def calibration(found: Predictions, objective: str, seed: int = 0) -> Interval:
    """Sum of predictions over sum of outcomes, on all rows that have a label; users are drawn."""
    column = found.objectives.index(objective)
    known = found.known[:, column]
    _, user = np.unique(found.user[known], return_inverse=True)
    said, happened = found.probability[known, column], found.labels[known, column]
    sums = np.bincount(user, said) * 1.0, np.bincount(user, happened) * 1.0
    drawn = bootstrap(
        sums, share, paired=True, vectorized=True, n_resamples=RESAMPLES, batch=AT_ONCE,
        method="percentile", rng=np.random.default_rng(seed),
    )  # fmt: skip
    low, high = drawn.confidence_interval
    return Interval(float(share(sums[0], sums[1])), float(low), float(high))


def share(part: np.ndarray, whole: np.ndarray, axis: int = -1) -> Floats:
    """One sum over another; infinite where the other is zero."""
    part, whole = part.sum(axis), whole.sum(axis)
    return np.asarray(np.divide(part, whole, out=np.full_like(part, np.inf), where=whole > 0))


def difference(
    ours: Floats, theirs: Floats, rows: Floats, positives: Floats, axis: int = -1
) -> Floats:
    """Of NE, from sums of logloss, rows and positives by user."""
    ours, theirs, rows, positives = (x.sum(axis) for x in (ours, theirs, rows, positives))
    rate = np.clip(positives / rows, ETA, 1 - ETA)
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    return np.asarray((ours - theirs) / (rows * entropy))


def by_user(found: Sequence[Predictions], objective: str) -> Floats:
    """Sums by user (U, models + 2): each model's logloss, then rows and positives."""
    first = found[0]
    column = first.objectives.index(objective)
    known = first.known[:, column]
    labels = first.labels[known, column].astype(np.float64)
    _, user = np.unique(first.user[known], return_inverse=True)
    columns = []
    for p in found:
        assert (p.impressions == first.impressions).all()
        said = np.clip(p.probability[known, column], ETA, 1 - ETA)
        columns.append(-np.log(np.where(labels > 0, said, 1 - said)))
    columns += [np.ones(len(labels)), labels]
    return np.stack([np.bincount(user, x) for x in columns], 1)
