"""Learning of calibration offsets, net rates and values from labels; offsets are in offsets.py.

Each refresh is a step of online Bayesian regression with a diagonal Laplace approximation (Chapelle
and Li, 2011, algorithm 3), in which earlier labels count less by their age: logistic regression of
labels, gamma regression with a logarithmic link of the values of outcomes. The offsets of a segment
have a normal prior around zero, whose precision is estimated from the offsets themselves (empirical
Bayes; MacKay, 1992): where values do not differ, offsets vanish.

n rows, V values of a segment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from etl.array_types import Float64, Int64
from etl.spec.units import DAY
from ranking.inputs.segments import SegmentValues
from ranking.scoring.calibration import PRIOR_STRENGTH
from ranking.scoring.likelihoods import GammaLikelihood, Likelihood, LogisticLikelihood
from ranking.scoring.offsets import (
    INITIAL_PRECISION,
    INTERCEPT,
    CalibrationOffsets,
    LabeledRows,
    SegmentOffsets,
    SlopeOffset,
)
from ranking.scoring.outcome_values import OutcomeValues

INTERCEPT_HALF_LIFE = 1 * DAY  # of the weight of labels
SEGMENT_HALF_LIFE = 7 * DAY  # also of the slope, and of all offsets of net rates and values
PRECISION_WEIGHT = 4  # the initial precision counts as that of this many values
MAX_ITERATIONS = 30  # of the estimate of a prior's precision
MIN_SLOPE = -0.9  # calibrated logits stay increasing
MIN_PRECISION = 0.01  # a value whose labels count less is forgotten


def refresh_offsets(
    offsets: CalibrationOffsets, rows: Mapping[str, LabeledRows], until: int
) -> CalibrationOffsets:
    """Offsets that have also learned rows, by objective, whose labels became final by `until`.

    The probabilities of rows are calibrated, without offsets. Segments that rows do not have are
    dropped.
    """
    elapsed = until - offsets.labels_until
    by_objective, slopes = {}, {}
    for name, labeled in rows.items():
        likelihood, before = LogisticLikelihood.of(labeled), offsets.by_objective.get(name, {})
        slope = _decayed_slope(offsets.slopes.get(name), likelihood.logits, elapsed)
        by_objective[name], slopes[name] = _refresh(
            before, likelihood, labeled.segments, elapsed, slope
        )
    known_slopes = {name: slope for name, slope in slopes.items() if slope}
    return offsets.model_copy(
        update={"labels_until": until, "by_objective": by_objective, "slopes": known_slopes}
    )


def refresh_net_rates(
    offsets: CalibrationOffsets, rows: Mapping[str, LabeledRows], elapsed: int
) -> CalibrationOffsets:
    """Offsets whose net rates have learned rows, after `elapsed` seconds.

    Rows are outcomes of objectives that can be retracted, with the label 1 for those that were
    not; their probabilities are BASE_NET_RATE. Outcomes are few: the intercept has the half-life of
    segments.
    """
    refreshed = {
        name: _refresh(
            offsets.net_rates.get(name, {}),
            LogisticLikelihood.of(labeled),
            labeled.segments,
            elapsed,
            intercept_half_life=SEGMENT_HALF_LIFE,
        )[0]
        for name, labeled in rows.items()
    }
    return offsets.model_copy(update={"net_rates": refreshed})


def refresh_value_offsets(
    offsets: CalibrationOffsets, outcomes: Mapping[str, OutcomeValues], elapsed: int
) -> CalibrationOffsets:
    """Offsets of values that have learned outcomes, after `elapsed` seconds.

    Predicted values are not calibrated. Values drift more slowly than rates, and outcomes are
    fewer: the intercept has the half-life of segments here, too.
    """
    refreshed = dict(offsets.values)
    for name, values in outcomes.items():
        before = offsets.values.get(name, {})
        refreshed[name], _ = _refresh(
            before,
            GammaLikelihood.of(values),
            values.segments,
            elapsed,
            intercept_half_life=SEGMENT_HALF_LIFE,
        )
    return offsets.model_copy(update={"values": refreshed})


@dataclass(frozen=True)
class _Belief:
    """A normal belief on the offsets (V) of a segment's values.

    `precision` (V) is that of labels alone; that of the prior is added to it.
    """

    values: Int64
    mean: Float64
    precision: Float64
    prior_precision: float

    @property
    def total_precision(self) -> Float64:
        """The precision of labels and prior together (V)."""
        return self.precision + self.prior_precision


@dataclass(frozen=True)
class _SlopeBelief:
    """A normal belief on a slope, and what it multiplies in each row: `score` (n).

    `precision` is that of labels alone. The prior has the precision of PRIOR_STRENGTH rare
    positives whose scores have a variance of one.
    """

    center: float
    score: Float64
    mean: float
    precision: float


def _decayed_slope(
    stored: SlopeOffset | None, logits: Float64, elapsed: int
) -> _SlopeBelief | None:
    """The belief on a slope before rows are learned; None if none have been."""
    if stored is None:
        if not len(logits):
            return None
        stored = SlopeOffset(center=float(logits.mean()))
    score = logits - stored.center
    decay = 0.5 ** (elapsed / SEGMENT_HALF_LIFE)
    precision = decay * stored.precision
    evidence = decay * stored.offset * (stored.precision + PRIOR_STRENGTH)
    return _SlopeBelief(stored.center, score, evidence / (precision + PRIOR_STRENGTH), precision)


def _refresh(
    offsets: Mapping[str, SegmentOffsets],
    likelihood: Likelihood,
    segments: SegmentValues,
    elapsed: int,
    slope: _SlopeBelief | None = None,
    intercept_half_life: int = INTERCEPT_HALF_LIFE,
) -> tuple[dict[str, SegmentOffsets], SlopeOffset | None]:
    """The offsets of one objective, and its slope, after `elapsed` seconds and some rows.

    `segments` are the values (n) of the rows.
    """
    columns = {INTERCEPT: np.zeros(len(likelihood), np.int64)} | segments
    half_lives = dict.fromkeys(columns, SEGMENT_HALF_LIFE) | {INTERCEPT: intercept_half_life}
    beliefs = {
        segment: _decayed_belief(
            segment, offsets.get(segment), column, 0.5 ** (elapsed / half_lives[segment])
        )
        for segment, column in columns.items()
    }
    index = {s: np.searchsorted(beliefs[s].values, column) for s, column in columns.items()}
    means, slope_mean, weights = _fit_offsets(
        likelihood, list(beliefs.values()), list(index.values()), slope
    )
    refreshed = {}
    for (segment, belief), mean in zip(beliefs.items(), means, strict=True):
        information = np.bincount(index[segment], weights, minlength=len(mean))
        learned = replace(belief, mean=mean, precision=belief.precision + information)
        if segment != INTERCEPT:
            learned = _with_estimated_prior(learned)
        refreshed[segment] = _to_offsets(learned)
    if slope is None:
        return refreshed, None
    precision = slope.precision + float(weights @ slope.score**2)
    return refreshed, SlopeOffset(center=slope.center, offset=slope_mean, precision=precision)


def _decayed_belief(
    segment: str, stored: SegmentOffsets | None, column: Int64, decay: float
) -> _Belief:
    """The belief on stored offsets and on the values (n) of a segment, before rows are learned.

    `decay` is the factor of what earlier labels count.
    """
    if stored is None:
        prior = PRIOR_STRENGTH if segment == INTERCEPT else INITIAL_PRECISION
        stored = SegmentOffsets(prior_precision=prior)
    values = np.union1d(column, np.array(stored.values, np.int64))
    position = np.searchsorted(values, stored.values)
    precision, evidence = np.zeros((2, len(values)))
    precision[position] = decay * np.array(stored.precisions)
    stored_precision = np.array(stored.precisions) + stored.prior_precision
    evidence[position] = decay * np.array(stored.offsets) * stored_precision
    mean = evidence / (precision + stored.prior_precision)
    return _Belief(values, mean, precision, stored.prior_precision)


def _fit_offsets(
    likelihood: Likelihood,
    beliefs: Sequence[_Belief],
    index: Sequence[Int64],
    slope: _SlopeBelief | None,
) -> tuple[list[Float64], float, Float64]:
    """The most probable offsets of each segment, slope, and the information of rows (n).

    `index` has the position (n) of each row's value in each segment.
    """
    from scipy.optimize import minimize  # not needed for serving

    score = np.zeros(len(index[0])) if slope is None else slope.score
    slope_mean, slope_precision = 0.0, 1.0
    if slope is not None:
        slope_mean, slope_precision = slope.mean, slope.precision + PRIOR_STRENGTH
    bounds = np.cumsum([len(belief.values) for belief in beliefs])
    before = np.append(np.concatenate([belief.mean for belief in beliefs]), slope_mean)
    precision = np.append(
        np.concatenate([belief.total_precision for belief in beliefs]), slope_precision
    )

    def added_offsets(parameters: Float64) -> Float64:
        *parts, slope_part = np.split(parameters, bounds)
        added = sum(part[i] for part, i in zip(parts, index, strict=True))
        return np.asarray(added + slope_part[0] * score)

    def loss_and_gradient(parameters: Float64) -> tuple[float, Float64]:
        added, deviation = added_offsets(parameters), parameters - before
        residual = likelihood.gradient(added)
        by_value = [
            np.bincount(i, residual, minlength=len(belief.values))
            for i, belief in zip(index, beliefs, strict=True)
        ]
        gradient = np.append(np.concatenate(by_value), residual @ score)
        penalty = 0.5 * float(precision @ deviation**2)
        return likelihood.loss(added) + penalty, gradient + precision * deviation

    most = likelihood.max_offset
    bound = [(None if most is None else -most, most)] * (len(before) - 1) + [(MIN_SLOPE, None)]
    fitted = minimize(loss_and_gradient, before, jac=True, method="L-BFGS-B", bounds=bound).x
    *means, slope_part = np.split(fitted, bounds)
    return means, float(slope_part[0]), likelihood.information(added_offsets(fitted))


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
