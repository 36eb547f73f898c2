"""Likelihoods of labels and of values of outcomes, from which calibration offsets are learned.

n rows.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from typing_extensions import override

from etl.array_types import Float64
from ranking.scoring.calibration import Labels, logit, sigmoid
from ranking.scoring.offsets import LabeledRows
from ranking.scoring.outcome_values import OutcomeValues

MAX_VALUE_OFFSET = 3.0  # outcomes without any value would lower offsets without end


class Likelihood(Protocol):
    """The likelihood of rows (n), given offsets that are added to what was predicted of them."""

    max_offset: float | None
    """Bound of the absolute value of each offset."""

    def __len__(self) -> int:
        """The number of rows."""

    def loss(self, added: Float64) -> float:
        """The negative log-likelihood of the rows, without constants."""

    def gradient(self, added: Float64) -> Float64:
        """Its derivative by the offset of each row (n)."""

    def information(self, added: Float64) -> Float64:
        """Its expected second derivative by the offset of each row (n)."""


@dataclass(frozen=True)
class LogisticLikelihood(Likelihood):
    """Labels (n) of rows with predicted logits (n)."""

    logits: Float64
    labels: Labels
    max_offset: float | None = None

    @classmethod
    def of(cls, rows: LabeledRows) -> "LogisticLikelihood":
        """The likelihood of rows with predicted probabilities."""
        return cls(logit(rows.probabilities), rows.labels)

    @override
    def __len__(self) -> int:
        return len(self.labels)

    @override
    def loss(self, added: Float64) -> float:
        z = self.logits + added
        return float((np.logaddexp(0, z) - self.labels * z).sum())

    @override
    def gradient(self, added: Float64) -> Float64:
        return np.asarray(sigmoid(self.logits + added) - self.labels)

    @override
    def information(self, added: Float64) -> Float64:
        p = sigmoid(self.logits + added)
        return np.asarray(p * (1 - p))


@dataclass(frozen=True)
class GammaLikelihood(Likelihood):
    """Ratios (n) of actual to predicted values; their squared coefficient of variation is one.

    An estimate of it from few rows would give little weight to just those with large values, and
    bias the offsets.
    """

    ratios: Float64
    max_offset: float | None = MAX_VALUE_OFFSET

    @classmethod
    def of(cls, values: OutcomeValues) -> "GammaLikelihood":
        """The likelihood of outcomes; negative values count as zero."""
        return cls(np.maximum(values.actual, 0) / values.predicted)

    @override
    def __len__(self) -> int:
        return len(self.ratios)

    @override
    def loss(self, added: Float64) -> float:
        return float((self.ratios * np.exp(-added) + added).sum())

    @override
    def gradient(self, added: Float64) -> Float64:
        return np.asarray(1 - self.ratios * np.exp(-added))

    @override
    def information(self, added: Float64) -> Float64:
        return np.ones(len(added))
