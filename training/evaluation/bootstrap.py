"""Bootstrap confidence intervals of NE differences and calibration, resampling users.

U users. The rows of a user are correlated, so users are drawn with replacement.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import bootstrap

from training.evaluation.predictions import Predictions

Floats = npt.NDArray[np.float64]
ETA = 1e-12
RESAMPLES = 1000
RESAMPLES_PER_BATCH = 100  # limits memory


@dataclass(frozen=True)
class ConfidenceInterval:
    """A value with its 95 % confidence interval."""

    value: float
    low: float
    high: float

    @property
    def is_significant(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        """In units of 1e-4, as differences of NE are small."""
        return f"{1e4 * self.value:+.0f} [{1e4 * self.low:+.0f}, {1e4 * self.high:+.0f}]"


def paired_ne_difference(
    treatment: Sequence[Predictions], control: Sequence[Predictions], objective: str, seed: int = 0
) -> ConfidenceInterval:
    """NE of the treatment minus that of the control, each the mean over its seeds.

    All predictions must be of the same rows; rows without a final label are excluded.
    """
    sums = sums_by_user([*treatment, *control], objective)
    n = len(treatment)
    data = (sums[:, :n].mean(1), sums[:, n:-2].mean(1), sums[:, -2], sums[:, -1])
    return _percentile_interval(data, ne_difference, seed)


def calibration_interval(
    predictions: Predictions, objective: str, seed: int = 0
) -> ConfidenceInterval:
    """Sum of predictions over sum of positives, on all rows with a final label."""
    column = predictions.objectives.index(objective)
    is_final = predictions.label_mask[:, column]
    _, user = np.unique(predictions.user_hashes[is_final], return_inverse=True)
    predicted = np.bincount(user, predictions.probabilities[is_final, column]).astype(np.float64)
    positives = np.bincount(user, predictions.labels[is_final, column]).astype(np.float64)
    return _percentile_interval((predicted, positives), ratio_of_sums, seed)


def _percentile_interval(
    sums: Sequence[Floats], statistic: Callable[..., Floats], seed: int
) -> ConfidenceInterval:
    """The statistic of sums by user (U), and its percentile bootstrap interval."""
    result = bootstrap(
        sums,
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        batch=RESAMPLES_PER_BATCH,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    low, high = result.confidence_interval
    return ConfidenceInterval(float(statistic(*sums)), float(low), float(high))


def ratio_of_sums(numerator: Floats, denominator: Floats, axis: int = -1) -> Floats:
    """Ratio of two sums; infinite if the denominator is zero."""
    total, divisor = np.asarray(numerator.sum(axis)), np.asarray(denominator.sum(axis))
    ratio = np.divide(total, divisor, out=np.full_like(total, np.inf), where=divisor > 0)
    return np.asarray(ratio)


def ne_difference(
    treatment: Floats, control: Floats, rows: Floats, positives: Floats, axis: int = -1
) -> Floats:
    """Difference of NE, from sums of logloss, rows and positives per user."""
    difference, count = treatment.sum(axis) - control.sum(axis), rows.sum(axis)
    rate = np.clip(positives.sum(axis) / count, ETA, 1 - ETA)
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    return np.asarray(difference / (count * entropy))


def sums_by_user(predictions: Sequence[Predictions], objective: str) -> Floats:
    """Sums by user (U, models + 2): the logloss of each model, then rows and positives."""
    first = predictions[0]
    column = first.objectives.index(objective)
    is_final = first.label_mask[:, column]
    labels = first.labels[is_final, column].astype(np.float64)
    _, user = np.unique(first.user_hashes[is_final], return_inverse=True)
    columns = []
    for model in predictions:
        assert (model.impression_ids == first.impression_ids).all()
        p = np.clip(model.probabilities[is_final, column], ETA, 1 - ETA)
        columns.append(-np.log(np.where(labels > 0, p, 1 - p)))
    columns += [np.ones(len(labels)), labels]
    return np.stack([np.bincount(user, column_values) for column_values in columns], 1)
