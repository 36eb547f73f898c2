"""Predicted values of outcomes, compared with actual ones.

n outcomes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from etl.array_types import Float64
from etl.spec.base import StrictModel
from ranking.inputs.segments import SegmentValues


@dataclass(frozen=True)
class OutcomeValues:
    """Predicted and actual values (n) of outcomes that occurred, and the values (n) of segments."""

    predicted: Float64
    actual: Float64
    segments: SegmentValues


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


def concat_outcomes(parts: Iterable[Mapping[str, OutcomeValues]]) -> dict[str, OutcomeValues]:
    """The outcomes of several parts, by objective."""
    by_objective: dict[str, list[OutcomeValues]] = {}
    for part in parts:
        for name, outcomes in part.items():
            by_objective.setdefault(name, []).append(outcomes)
    return {
        name: OutcomeValues(
            np.concatenate([part.predicted for part in outcomes]),
            np.concatenate([part.actual for part in outcomes]),
            {
                segment: np.concatenate([part.segments[segment] for part in outcomes])
                for segment in outcomes[0].segments
            },
        )
        for name, outcomes in by_objective.items()
    }


def value_evaluations(outcomes: Mapping[str, OutcomeValues]) -> tuple[ValueEvaluation, ...]:
    """The sums of each objective with outcomes."""
    return tuple(
        ValueEvaluation(
            objective=name,
            outcomes=len(values.actual),
            predicted=float(values.predicted.sum()),
            actual=float(values.actual.sum()),
        )
        for name, values in outcomes.items()
        if len(values.actual)
    )
