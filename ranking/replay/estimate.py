"""What another order of the ads shown would have brought, by inverse propensities.

An outcome counts where the other order leaves its ad in the place that it had, over the probability
of that (item-position model: Li, Abbasi-Yadkori, Kveton, Muthukrishnan, Vinay and Wen 2018). It is
unbiased if an outcome depends on its ad, its request and its place, not on its neighbours.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import bootstrap

from training.loop.paired import Interval

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
RESAMPLES = 1000


@dataclass(frozen=True)
class Estimate:
    """A mean by request: as it was logged, in the other order, and the difference."""

    logged: Interval
    other: Interval
    apart: Interval


def estimate(
    gains: Floats, places: Ints, other: Ints, chances: Floats, request: Ints, user: Ints
) -> Estimate:
    """Of what ads brought (B), with their places as logged and otherwise (B).

    `chances` (B) are those of the logged place; `request` and `user` (B) are numbers. Users are
    drawn with replacement.
    """
    weighed = gains * (places == other) / chances
    _, first, owner = np.unique(request, return_index=True, return_inverse=True)
    _, whose = np.unique(user[first], return_inverse=True)
    both = (np.bincount(owner, values, len(first)) for values in (gains, weighed))
    sums = [np.bincount(whose, values).astype(np.float64) for values in both]
    rows = np.bincount(whose).astype(np.float64)
    return Estimate(
        _interval(sums[0], rows), _interval(sums[1], rows), _interval(sums[1] - sums[0], rows)
    )


def _interval(sums: Floats, rows: Floats) -> Interval:
    found = bootstrap(
        (sums, rows), _mean, paired=True, vectorized=True, n_resamples=RESAMPLES, batch=100,
        method="percentile", rng=np.random.default_rng(0),
    )  # fmt: skip
    low, high = found.confidence_interval
    return Interval(float(_mean(sums, rows)), float(low), float(high))


def _mean(sums: Floats, rows: Floats, axis: int = -1) -> Floats:
    return np.asarray(sums.sum(axis) / rows.sum(axis))
