"""Predicted values of outcomes beside the actual ones, and their calibration in currency.

n outcomes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from etl.spec.base import StrictModel
from ranking.scoring.candidates import Floats

PRIOR_OUTCOMES = 50  # the previous factor counts as this many outcomes


@dataclass(frozen=True)
class OutcomeValues:
    """Predicted and actual values (n) of outcomes that occurred."""

    predicted: Floats
    actual: Floats


class ValueEvaluation(StrictModel):
    """The sum of predicted and of actual values of an objective's outcomes."""

    objective: str
    outcomes: int
    predicted: float
    actual: float

    @property
    def ratio(self) -> float:
        """Predicted over actual values; infinite if those are 0."""
        return self.predicted / self.actual if self.actual else float("inf")


def concat_values(parts: Iterable[Mapping[str, OutcomeValues]]) -> dict[str, OutcomeValues]:
    """The outcomes of several parts, by objective."""
    by_objective: dict[str, list[OutcomeValues]] = {}
    for part in parts:
        for name, values in part.items():
            by_objective.setdefault(name, []).append(values)
    return {
        name: OutcomeValues(
            np.concatenate([part.predicted for part in values]),
            np.concatenate([part.actual for part in values]),
        )
        for name, values in by_objective.items()
    }


def value_factor(values: OutcomeValues, previous: float = 1.0) -> float:
    """The factor by which predicted values add up to the actual ones.

    With few outcomes it stays close to the previous factor, which counts as PRIOR_OUTCOMES outcomes
    of mean predicted value.
    """
    if not len(values.predicted):
        return previous
    prior = PRIOR_OUTCOMES * float(values.predicted.mean())
    return float((values.actual.sum() + previous * prior) / (values.predicted.sum() + prior))


def value_evaluations(values: Mapping[str, OutcomeValues]) -> tuple[ValueEvaluation, ...]:
    """The sums of each objective with outcomes."""
    return tuple(
        ValueEvaluation(
            objective=name,
            outcomes=len(outcomes.actual),
            predicted=float(outcomes.predicted.sum()),
            actual=float(outcomes.actual.sum()),
        )
        for name, outcomes in values.items()
        if len(outcomes.actual)
    )
