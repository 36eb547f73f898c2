"""Offsets of calibrated logits: an intercept, a slope, and an offset for each value of segments.

They are learned from labels that became final after a ranker was trained, and refreshed between its
trainings (offset_updates.py).

n rows, O objectives.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from etl.array_types import Float64
from etl.spec.base import StrictModel
from ranking.inputs.segments import SegmentValues
from ranking.scoring.calibration import Labels, PlattScaling, calibrate, logit, sigmoid

BASE_NET_RATE = 0.95  # of outcomes that can be retracted, before there are labels
INTERCEPT = "intercept"  # the segment of all rows, whose only value is 0
INITIAL_PRECISION = 100.0  # of the prior of a segment's offsets, before there are labels


class SegmentOffsets(StrictModel):
    """The offsets of a segment's values for an objective; other values have none.

    `precisions` are those of the labels alone, `prior_precision` is that of the prior.
    """

    values: tuple[int, ...] = ()
    offsets: tuple[float, ...] = ()
    precisions: tuple[float, ...] = ()
    prior_precision: float = INITIAL_PRECISION

    @cached_property
    def table(self) -> Float64:
        """Offsets by value; the last row, zero, stands for all values beyond."""
        table = np.zeros(max(self.values, default=-1) + 2)
        table[list(self.values)] = self.offsets
        return table


class SlopeOffset(StrictModel):
    """What a unit of logit adds, counted from `center`; `precision` is that of labels alone."""

    center: float
    offset: float = 0.0
    precision: float = 0.0


class CalibrationOffsets(StrictModel):
    """The offsets of a ranker, by objective and segment, INTERCEPT included.

    They were learned from labels that were final by `labels_until` (epoch seconds). `net_rates` are
    offsets from the logit of BASE_NET_RATE, whose sum is the logit of the share of an objective's
    outcomes that are not retracted. `values` are offsets of the logarithms of predicted values.
    """

    surface: str
    version: str = ""
    """The ranker that they belong to."""
    labels_until: int
    by_objective: dict[str, dict[str, SegmentOffsets]] = {}
    slopes: dict[str, SlopeOffset] = {}
    net_rates: dict[str, dict[str, SegmentOffsets]] = {}
    values: dict[str, dict[str, SegmentOffsets]] = {}

    def __call__(
        self, logits: Float64, segments: SegmentValues, objectives: Sequence[str]
    ) -> Float64:
        """What is added to calibrated logits (…, O), given the values (…) of segments."""
        added = np.zeros_like(logits)
        for i, name in enumerate(objectives):
            added[..., i] = _total_offset(self.by_objective.get(name, {}), segments)
            if name in self.slopes:
                slope = self.slopes[name]
                added[..., i] += slope.offset * (logits[..., i] - slope.center)
        return added

    def net_rate(self, segments: SegmentValues, objectives: Sequence[str]) -> Float64:
        """The share of outcomes that are not retracted: (…, O), or (O) without segments.

        It is 1 for objectives whose outcomes are not retracted.
        """
        base = logit(np.array(BASE_NET_RATE))
        rates = [
            sigmoid(base + _total_offset(self.net_rates[name], segments))
            if name in self.net_rates
            else np.ones(_shape(segments))
            for name in objectives
        ]
        return np.stack(rates, -1)

    def value_factors(self, segments: SegmentValues, objectives: Sequence[str]) -> Float64:
        """The factors of predicted values of outcomes: (…, O), or (O) without segments."""
        added = [_total_offset(self.values.get(name, {}), segments) for name in objectives]
        return np.exp(np.stack(added, -1))


def _shape(segments: SegmentValues) -> tuple[int, ...]:
    return next(iter(segments.values())).shape if segments else ()


def _total_offset(offsets: Mapping[str, SegmentOffsets], segments: SegmentValues) -> Float64:
    """The sum of the intercept and of the offsets of segments, in the shape of their values."""
    known = offsets.get(INTERCEPT)
    total = np.full(_shape(segments), known.table[0] if known else 0.0)
    for segment, values in segments.items():
        if segment in offsets:
            table = offsets[segment].table
            total = total + table[np.minimum(values, len(table) - 1)]
    return np.asarray(total)


@dataclass(frozen=True)
class RankerCalibration:
    """The calibration of each objective's logits, then offsets by segment, if there are any.

    The offsets also calibrate predicted values of outcomes.
    """

    by_objective: Mapping[str, PlattScaling]
    offsets: CalibrationOffsets | None = None

    def value_factors(self, segments: SegmentValues, objectives: Sequence[str]) -> Float64:
        """The factors of predicted values of outcomes (…, O), given the values (…) of segments."""
        if self.offsets is None:
            return np.ones((*_shape(segments), len(objectives)))
        return self.offsets.value_factors(segments, objectives)

    @property
    def labels_until(self) -> int:
        """Epoch second until which the offsets have learned labels; 0 without offsets."""
        return self.offsets.labels_until if self.offsets else 0

    def __call__(
        self, logits: Float64, segments: SegmentValues, objectives: Sequence[str]
    ) -> Float64:
        """Calibrated probabilities (…, O) of logits (…, O), given the values (…) of segments."""
        probabilities = calibrate(self.by_objective, logits, objectives)
        if self.offsets is None:
            return probabilities
        calibrated = logit(probabilities)
        return sigmoid(calibrated + self.offsets(calibrated, segments, objectives))


@dataclass(frozen=True)
class LabeledRows:
    """Probabilities (n) and labels (n) of rows, and the values (n) of segments."""

    probabilities: Float64
    labels: Labels
    segments: SegmentValues
