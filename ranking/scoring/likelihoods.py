"""Likelihoods of labels and of values of outcomes, from which calibration offsets are learned.

n rows.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from typing_extensions import override

from ranking.scoring.calibration import Floats, Labels, logit, sigmoid
from ranking.scoring.offsets import LabeledRows
from ranking.scoring.outcome_values import OutcomeValues


class Likelihood(Protocol):
    """The likelihood of rows (n), given offsets that are added to what was predicted of them."""

    def __len__(self) -> int:
        """The number of rows."""

    def loss(self, added: Floats) -> float:
        """The negative log-likelihood of the rows, without constants."""

    def gradient(self, added: Floats) -> Floats:
        """Its derivative by the offset of each row (n)."""

    def information(self, added: Floats) -> Floats:
        """Its expected second derivative by the offset of each row (n)."""


@dataclass(frozen=True)
class LogisticLikelihood(Likelihood):
    """Labels (n) of rows with predicted logits (n)."""

    logits: Floats
    labels: Labels

    @classmethod
    def of(cls, rows: LabeledRows) -> "LogisticLikelihood":
        """The likelihood of rows with predicted probabilities."""
        return cls(logit(rows.probabilities), rows.labels)

    @override
    def __len__(self) -> int:
        return len(self.labels)

    @override
    def loss(self, added: Floats) -> float:
        z = self.logits + added
        return float((np.logaddexp(0, z) - self.labels * z).sum())

    @override
    def gradient(self, added: Floats) -> Floats:
        return np.asarray(sigmoid(self.logits + added) - self.labels)

    @override
    def information(self, added: Floats) -> Floats:
        p = sigmoid(self.logits + added)
        return np.asarray(p * (1 - p))


@dataclass(frozen=True)
class GammaLikelihood(Likelihood):
    """Values (n) over predicted ones, of which a dispersion is the squared relative error."""

    ratios: Floats
    dispersion: float

    @classmethod
    def of(cls, values: OutcomeValues, factors: Floats) -> "GammaLikelihood":
        """The likelihood of values; their dispersion is that with the factors (n) so far.

        One row of a relative error of one counts beside the rows.
        """
        ratios = values.actual / values.predicted
        errors = ratios / factors - 1
        return cls(ratios, float((errors @ errors + 1) / (len(errors) + 1)))

    @override
    def __len__(self) -> int:
        return len(self.ratios)

    @override
    def loss(self, added: Floats) -> float:
        return float((self.ratios * np.exp(-added) + added).sum()) / self.dispersion

    @override
    def gradient(self, added: Floats) -> Floats:
        return np.asarray((1 - self.ratios * np.exp(-added)) / self.dispersion)

    @override
    def information(self, added: Floats) -> Floats:
        return np.full(len(added), 1 / self.dispersion)
