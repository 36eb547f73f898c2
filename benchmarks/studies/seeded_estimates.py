"""Estimates on the NE of several models, with the noise of users and that of seeds.

The two sources are added: the estimate on users drawn with replacement (bootstrap), and the
variance of a mean over seeds. Degrees of freedom are those of Welch and Satterthwaite, because a
variance over few seeds is itself uncertain.

U users, M models, D draws of users.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from etl.array_types import Float64
from training.evaluation.predictions import ETA, Predictions, format_ne_interval, sums_by_user

DRAWS, DRAWS_PER_BATCH = 1000, 100  # batches limit memory
LEVEL = 0.05


@dataclass(frozen=True)
class SeededEstimate:
    """A value with its standard error, and the 95 % interval of Student's t distribution."""

    value: float
    standard_error: float
    degrees_of_freedom: float

    @classmethod
    def combine(cls, value: float, *variances: tuple[float, float]) -> "SeededEstimate":
        """A value with independent sources of noise: pairs of a variance and its degrees."""
        total = sum(variance for variance, _ in variances)
        parts = sum(variance**2 / degrees for variance, degrees in variances if variance)
        return cls(value, total**0.5, total**2 / parts if parts else np.inf)

    @property
    def variance(self) -> tuple[float, float]:
        """The squared standard error, and its degrees of freedom."""
        return self.standard_error**2, self.degrees_of_freedom

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return self.value - self._half_width

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        return self.value + self._half_width

    @property
    def p_value(self) -> float:
        """Two-sided p-value of the hypothesis that the true value is zero."""
        if not self.standard_error:
            return 1.0 if self.value == 0 else 0.0
        t = abs(self.value) / self.standard_error
        return float(2 * stats.t.sf(t, self.degrees_of_freedom))

    @property
    def _half_width(self) -> float:
        return float(stats.t.ppf(1 - LEVEL / 2, self.degrees_of_freedom)) * self.standard_error

    def __str__(self) -> str:
        """As a difference of NE."""
        return format_ne_interval(self.value, self.low, self.high)


@dataclass(frozen=True)
class NeByUser:
    """NE of M models on the same rows: `ne` (M), `drawn` (D, M) on drawn users, and U."""

    ne: Float64
    drawn: Float64
    users: int

    @classmethod
    def of(cls, models: Sequence[Predictions], objective: str, seed: int = 0) -> "NeByUser":
        """NE of an objective, on rows with a final label."""
        sums = sums_by_user(models, objective)
        users, rng = len(sums), np.random.default_rng(seed)
        drawn = [
            normalized_entropy(
                rng.multinomial(users, np.full(users, 1 / users), DRAWS_PER_BATCH) @ sums
            )
            for _ in range(DRAWS // DRAWS_PER_BATCH)
        ]
        return cls(normalized_entropy(sums.sum(0)[None])[0], np.concatenate(drawn), users)

    def contrast(self, weights: Float64, *seed_variances: tuple[float, float]) -> SeededEstimate:
        """The sum of NE times `weights` (M), with the variances that are due to seeds."""
        user_variance = float(np.var(self.drawn @ weights, ddof=1))
        return SeededEstimate.combine(
            float(self.ne @ weights), (user_variance, self.users - 1), *seed_variances
        )


def normalized_entropy(sums: Float64) -> Float64:
    """NE (D, M) from sums (D, M + 2) of each model's logloss, of rows, and of positives."""
    rows, positives = sums[:, -2:-1], sums[:, -1:]
    rate = np.clip(positives / rows, ETA, 1 - ETA)
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    return np.asarray(sums[:, :-2] / (rows * entropy))


def ne_difference_over_seeds(
    treatment: Sequence[Predictions], control: Sequence[Predictions], objective: str
) -> SeededEstimate:
    """NE of the treatment minus that of the control, each the mean over its seeds.

    Seeds are paired if there are as many of both. With one seed their noise is unknown, and left
    out.
    """
    n, m = len(treatment), len(control)
    models = NeByUser.of([*treatment, *control], objective)
    weights = np.concatenate((np.full(n, 1 / n), np.full(m, -1 / m)))
    first, second = models.ne[:n], models.ne[n:]
    parts = [first - second] if n == m else [first, second]
    seed_variances = [variance_of_mean(part) for part in parts if len(part) > 1]
    return models.contrast(weights, *seed_variances)


def variance_of_mean(values: Float64) -> tuple[float, float]:
    """The variance of the mean of values, and its degrees of freedom."""
    return float(np.var(values, ddof=1)) / len(values), len(values) - 1


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for their number (Holm, 1979): each is at least the uncorrected one."""
    order = np.argsort(p_values, kind="stable")
    factors = len(p_values) - np.arange(len(p_values))
    ordered = np.minimum(1, np.maximum.accumulate(np.asarray(p_values)[order] * factors))
    corrected = np.empty(len(p_values))
    corrected[order] = ordered
    return [float(p) for p in corrected]
