"""Bootstrap intervals of differences of AUC; whole users are resampled.

n rows, U users, D draws of users.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from etl.array_types import Bools, Float64, Floats, Int64
from training.evaluation.predictions import (
    RESAMPLES,
    RESAMPLES_PER_BATCH,
    ConfidenceInterval,
    Predictions,
)


def paired_auc_difference(
    treatment: Sequence[Predictions], control: Sequence[Predictions], objective: str, seed: int = 0
) -> ConfidenceInterval:
    """AUC of the treatment minus that of the control, each the mean over its models.

    All predictions must be of the same rows; rows without a final label are excluded. The AUC is
    that of all rows together, so predictions of several days are pooled by concatenating them.
    """
    first = treatment[0]
    column = first.objectives.index(objective)
    is_final = first.label_mask[:, column]
    labels = first.labels[is_final, column]
    users, user = np.unique(first.user_hashes[is_final], return_inverse=True)
    ranked = []
    for model in (*treatment, *control):
        assert (model.impression_ids == first.impression_ids).all(), "predictions of other rows"
        ranked.append(RankedRows.of(model.probabilities[is_final, column], labels, user))

    def difference(weights: Float64) -> Float64:
        aucs = np.stack([model.auc(weights) for model in ranked])
        return np.asarray(aucs[: len(treatment)].mean(0) - aucs[len(treatment) :].mean(0))

    (value,) = difference(np.ones((len(users), 1)))
    resampled = np.concatenate([difference(weights) for weights in _draws(len(users), seed)])
    low, high = np.nanquantile(resampled, (0.025, 0.975))
    return ConfidenceInterval(float(value), float(low), float(high))


def _draws(users: int, seed: int) -> Iterator[Float64]:
    """How often each user is drawn (U, RESAMPLES_PER_BATCH), RESAMPLES draws in all."""
    rng = np.random.default_rng(seed)
    for _ in range(RESAMPLES // RESAMPLES_PER_BATCH):
        drawn = rng.multinomial(users, np.full(users, 1 / users), RESAMPLES_PER_BATCH)
        yield np.ascontiguousarray(drawn.T, np.float64)


@dataclass(frozen=True)
class RankedRows:
    """Rows in order of prediction, for AUCs with any weights of users.

    `user` (n) is in that order. Of each positive row, `below` is the number of rows with a smaller
    prediction, and `up_to` that of rows with a smaller or an equal one.
    """

    user: Int64
    is_positive: Bools
    below: Int64
    up_to: Int64

    @classmethod
    def of(cls, predicted: Float64, labels: Floats, user: Int64) -> "RankedRows":
        """Rank predictions (n) of rows with labels (n) and users (n)."""
        order = np.argsort(predicted, kind="stable")
        ordered, is_positive = predicted[order], labels[order] > 0
        positives = ordered[is_positive]
        return cls(
            user=user[order],
            is_positive=is_positive,
            below=np.searchsorted(ordered, positives, "left"),
            up_to=np.searchsorted(ordered, positives, "right"),
        )

    def auc(self, weights: Float64) -> Float64:
        """AUC (D) of rows with the weight of their user (U, D): Mann-Whitney, ties count half.

        NaN where only one class has weight.
        """
        by_row = weights[self.user]
        positive = by_row[self.is_positive]
        by_row[self.is_positive] = 0
        negative = np.concatenate((np.zeros((1, weights.shape[1])), by_row.cumsum(0)))
        lower = negative[self.below] + negative[self.up_to]
        concordant = np.einsum("nd,nd->d", positive, lower) / 2
        pairs = positive.sum(0) * negative[-1]
        nan = np.full(weights.shape[1], np.nan)
        return np.asarray(np.divide(concordant, pairs, out=nan, where=pairs > 0))
