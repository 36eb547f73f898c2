"""Offsets of calibrated logits: an intercept, and an offset for each value of some segments.

They are learned from labels that became final after a ranker was trained, and refreshed between its
trainings. Each refresh is a step of online Bayesian logistic regression with a diagonal Laplace
approximation (Chapelle and Li, 2011, algorithm 3), in which earlier labels count less by their age.
The offsets of a segment have a normal prior around zero, whose precision is estimated from the
offsets themselves (empirical Bayes; MacKay, 1992): where values do not differ, offsets vanish.

n rows, V values of a segment, O objectives.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from etl.spec.base import StrictModel
from etl.spec.units import DAY
from ranking.inputs.segments import Int64, SegmentValues
from ranking.scoring.calibration import (
    PRIOR_STRENGTH,
    Calibration,
    Floats,
    Labels,
    calibrate,
    logit,
    sigmoid,
)

BASE_NET_RATE = 0.95  # of outcomes that can be taken back, before there are labels
INTERCEPT = "intercept"  # the segment of all rows, whose only value is 0
INTERCEPT_HALF_LIFE = 1 * DAY  # of the weight of labels
SEGMENT_HALF_LIFE = 7 * DAY
INITIAL_PRECISION = 100.0  # of the prior of a segment's offsets, before there are labels
PRECISION_WEIGHT = 4  # the initial precision counts as that of this many values
MAX_ITERATIONS = 30  # of the estimate of a prior's precision
MIN_PRECISION = 0.01  # a value whose labels count less is forgotten


class SegmentOffsets(StrictModel):
    """The offsets of a segment's values for an objective; other values have none.

    `precisions` are those of the labels alone, `prior_precision` is that of the prior.
    """

    values: tuple[int, ...] = ()
    offsets: tuple[float, ...] = ()
    precisions: tuple[float, ...] = ()
    prior_precision: float = INITIAL_PRECISION

    @cached_property
    def table(self) -> Floats:
        """Offsets by value; the last row, zero, stands for all values beyond."""
        table = np.zeros(max(self.values, default=-1) + 2)
        table[list(self.values)] = self.offsets
        return table


class CalibrationOffsets(StrictModel):
    """The offsets of a ranker, by objective and segment, INTERCEPT included.

    They were learned from labels that were final by `labels_until` (epoch seconds). `net_rates` are
    offsets from the logit of BASE_NET_RATE, whose sum is the logit of the share of an objective's
    outcomes that are not taken back.
    """

    surface: str
    version: str = ""
    """The ranker that they belong to."""
    labels_until: int
    by_objective: dict[str, dict[str, SegmentOffsets]] = {}
    net_rates: dict[str, dict[str, SegmentOffsets]] = {}

    def __call__(self, segments: SegmentValues, objectives: Sequence[str]) -> Floats:
        """What is added to calibrated logits: (…, O), given the values (…) of segments, or (O)."""
        return np.stack(
            [_total_offset(self.by_objective.get(name, {}), segments) for name in objectives], -1
        )

    def net_rate(self, segments: SegmentValues, objectives: Sequence[str]) -> Floats:
        """The share of outcomes that are not taken back: (…, O), or (O) without segments.

        It is 1 for objectives whose outcomes are not taken back.
        """
        base = logit(np.array(BASE_NET_RATE))
        rates = [
            sigmoid(base + _total_offset(self.net_rates[name], segments))
            if name in self.net_rates
            else np.ones(_shape(segments))
            for name in objectives
        ]
        return np.stack(rates, -1)


def _shape(segments: SegmentValues) -> tuple[int, ...]:
    return next(iter(segments.values())).shape if segments else ()


def _total_offset(offsets: Mapping[str, SegmentOffsets], segments: SegmentValues) -> Floats:
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
    """The calibration of each objective's logits, then offsets by segment, if there are any."""

    by_objective: Mapping[str, Calibration]
    offsets: CalibrationOffsets | None = None

    @property
    def labels_until(self) -> int:
        """Epoch second until which the offsets have learned labels; 0 without offsets."""
        return self.offsets.labels_until if self.offsets else 0

    def __call__(self, logits: Floats, segments: SegmentValues) -> Floats:
        """Calibrated probabilities (…, O) of logits (…, O), given the values (…) of segments."""
        objectives = list(self.by_objective)
        probabilities = calibrate(self.by_objective, logits, objectives)
        if self.offsets is None:
            return probabilities
        return sigmoid(logit(probabilities) + self.offsets(segments, objectives))


@dataclass(frozen=True)
class LabeledRows:
    """Probabilities (n) and labels (n) of rows, and the values (n) of segments."""

    probabilities: Floats
    labels: Labels
    segments: SegmentValues


def refresh_offsets(
    offsets: CalibrationOffsets, rows: Mapping[str, LabeledRows], until: int
) -> CalibrationOffsets:
    """Offsets that have also learned rows, by objective, whose labels became final by `until`.

    The probabilities of rows are calibrated, without offsets. Segments that rows do not have are
    dropped.
    """
    elapsed = until - offsets.labels_until
    refreshed = {
        name: _refresh(offsets.by_objective.get(name, {}), labeled, elapsed)
        for name, labeled in rows.items()
    }
    return offsets.model_copy(update={"labels_until": until, "by_objective": refreshed})


def refresh_net_rates(
    offsets: CalibrationOffsets, rows: Mapping[str, LabeledRows], elapsed: int
) -> CalibrationOffsets:
    """Offsets whose net rates have learned rows, after `elapsed` seconds.

    Rows are outcomes of objectives that can be taken back, with the label 1 for those that were
    not; their probabilities are BASE_NET_RATE.
    """
    refreshed = {
        name: _refresh(offsets.net_rates.get(name, {}), labeled, elapsed)
        for name, labeled in rows.items()
    }
    return offsets.model_copy(update={"net_rates": refreshed})


@dataclass(frozen=True)
class _Belief:
    """A normal belief on the offsets (V) of a segment's values.

    `precision` (V) is that of labels alone; that of the prior is added to it.
    """

    values: Int64
    mean: Floats
    precision: Floats
    prior_precision: float

    @property
    def total_precision(self) -> Floats:
        """The precision of labels and prior together (V)."""
        return self.precision + self.prior_precision


def _refresh(
    offsets: Mapping[str, SegmentOffsets], rows: LabeledRows, elapsed: int
) -> dict[str, SegmentOffsets]:
    """The offsets of one objective, after `elapsed` seconds and some rows."""
    columns = {INTERCEPT: np.zeros(len(rows.labels), np.int64)} | rows.segments
    beliefs = {
        segment: _decayed_belief(segment, offsets.get(segment), column, elapsed)
        for segment, column in columns.items()
    }
    index = {s: np.searchsorted(beliefs[s].values, column) for s, column in columns.items()}
    means, weights = _fit_offsets(rows, list(beliefs.values()), list(index.values()))
    refreshed = {}
    for (segment, belief), mean in zip(beliefs.items(), means, strict=True):
        information = np.bincount(index[segment], weights, minlength=len(mean))
        learned = replace(belief, mean=mean, precision=belief.precision + information)
        if segment != INTERCEPT:
            learned = _with_estimated_prior(learned)
        refreshed[segment] = _to_offsets(learned)
    return refreshed


def _decayed_belief(
    segment: str, stored: SegmentOffsets | None, column: Int64, elapsed: int
) -> _Belief:
    """The belief on stored offsets and on the values (n) of a segment, before rows are learned."""
    if stored is None:
        prior = PRIOR_STRENGTH if segment == INTERCEPT else INITIAL_PRECISION
        stored = SegmentOffsets(prior_precision=prior)
    half_life = INTERCEPT_HALF_LIFE if segment == INTERCEPT else SEGMENT_HALF_LIFE
    decay = 0.5 ** (elapsed / half_life)
    values = np.union1d(column, np.array(stored.values, np.int64))
    position = np.searchsorted(values, stored.values)
    precision, evidence = np.zeros((2, len(values)))
    precision[position] = decay * np.array(stored.precisions)
    stored_precision = np.array(stored.precisions) + stored.prior_precision
    evidence[position] = decay * np.array(stored.offsets) * stored_precision
    mean = evidence / (precision + stored.prior_precision)
    return _Belief(values, mean, precision, stored.prior_precision)


def _fit_offsets(
    rows: LabeledRows, beliefs: Sequence[_Belief], index: Sequence[Int64]
) -> tuple[list[Floats], Floats]:
    """The most probable offsets of each segment, and the weight p (1 - p) of each row (n).

    `index` has the position (n) of each row's value in each segment.
    """
    from scipy.optimize import minimize  # not needed for serving

    before_offsets = logit(rows.probabilities)
    bounds = np.cumsum([len(belief.values) for belief in beliefs])[:-1]
    before = np.concatenate([belief.mean for belief in beliefs])
    precision = np.concatenate([belief.total_precision for belief in beliefs])

    def shifted_logits(offsets: Floats) -> Floats:
        parts = np.split(offsets, bounds)
        return before_offsets + sum(part[i] for part, i in zip(parts, index, strict=True))

    def loss_and_gradient(offsets: Floats) -> tuple[float, Floats]:
        z = shifted_logits(offsets)
        residual, deviation = sigmoid(z) - rows.labels, offsets - before
        log_loss = float((np.logaddexp(0, z) - rows.labels * z).sum())
        gradient = np.concatenate(
            [
                np.bincount(i, residual, minlength=len(belief.values))
                for i, belief in zip(index, beliefs, strict=True)
            ]
        )
        penalty = 0.5 * float(precision @ deviation**2)
        return log_loss + penalty, gradient + precision * deviation

    fitted = minimize(loss_and_gradient, before, jac=True, method="L-BFGS-B").x
    p = sigmoid(shifted_logits(fitted))
    return np.split(fitted, bounds), p * (1 - p)


def _with_estimated_prior(belief: _Belief) -> _Belief:
    """The belief under the precision of the prior that the offsets make most probable.

    It is a fixed point (MacKay, 1992), to which the initial precision contributes as much as
    PRECISION_WEIGHT values.
    """
    evidence = belief.mean * belief.total_precision
    prior = belief.prior_precision
    for _ in range(MAX_ITERATIONS):
        mean = evidence / (belief.precision + prior)
        well_determined = float((belief.precision / (belief.precision + prior)).sum())
        squares = float(mean @ mean) + PRECISION_WEIGHT / INITIAL_PRECISION
        prior = (well_determined + PRECISION_WEIGHT) / squares
    mean = evidence / (belief.precision + prior)
    return replace(belief, mean=mean, prior_precision=prior)


def _to_offsets(belief: _Belief) -> SegmentOffsets:
    """Without values whose labels have decayed."""
    kept = belief.precision >= MIN_PRECISION
    return SegmentOffsets(
        values=tuple(belief.values[kept].tolist()),
        offsets=tuple(belief.mean[kept].tolist()),
        precisions=tuple(belief.precision[kept].tolist()),
        prior_precision=belief.prior_precision,
    )
