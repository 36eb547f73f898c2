"""How well predictions are calibrated within segments, in units of noise.

The error of a segment is the expected cumulative calibration error (ECCE): the range of the sum of
outcomes less predictions over its rows, in the order of their predictions, zero included. It finds
a segment whose predictions are off on average, and one where high and low ones are off to opposite
sides. Under calibrated predictions that sum is a Brownian motion over its standard deviation, whose
range has a known distribution (Feller, 1951). The multicalibration error (MCE) is that of the worst
segment (MCGrad, 2509.19884), corrected here for the number of segments.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from etl.array_types import Float64, Int64
from etl.spec.base import StrictModel
from etl.spec.model import DataSpec
from ranking.inputs.segments import segment_value_name
from ranking.scoring.calibration import Labels
from ranking.scoring.offsets import LabeledRows
from ranking.scoring.outcome_values import ValueEvaluation

ALL_ROWS = "all"
MAX_SIGMA = 3.0  # errors are noise up to here, corrected for the number of segments
MIN_EXPECTED = 30  # expected positives, and negatives, of a segment that is judged
SERIES_TERMS = 60


class SegmentCalibration(StrictModel):
    """The calibration of an objective's predictions within one value of a segment."""

    objective: str
    segment: str
    value: int
    rows: int
    positives: int
    predicted: float
    """The expected number of positives."""
    p_value: float
    """Probability of as large an error under calibrated predictions."""
    error: float | None = None
    """The ECCE, in outcomes; None in records that were written before it was stored."""

    @property
    def ratio(self) -> float:
        """Predictions over outcomes; infinite without positives."""
        return self.predicted / self.positives if self.positives else float("inf")

    @property
    def relative_error(self) -> float:
        """The ECCE over outcomes: at least the deviation of `ratio` from 1."""
        deviation = abs(self.ratio - 1)
        if self.error is None or not self.positives:
            return deviation
        return max(deviation, self.error / self.positives)

    @property
    def sigma(self) -> float:
        """The standard score with the same two-sided probability as the error."""
        return to_sigma(self.p_value)


class SegmentEvaluation(StrictModel):
    """The calibration by segment on labels that became final from one epoch second to another.

    `values` are predicted and actual values of outcomes.
    """

    labels_from: int
    labels_until: int
    segments: tuple[SegmentCalibration, ...]
    values: tuple[ValueEvaluation, ...] = ()


def describe_segment(spec: DataSpec, calibration: SegmentCalibration) -> str:
    """Such as `click of category #7: predictions / outcomes 1.31 (58 positives)`."""
    ratio = f"predictions / outcomes {calibration.ratio:.2f} ({calibration.positives:,} positives)"
    return f"{calibration.objective} of {segment_name(spec, calibration)}: {ratio}"


def segment_name(spec: DataSpec, calibration: SegmentCalibration) -> str:
    """The value of the segment for readers, such as `category #7`."""
    if calibration.segment == ALL_ROWS:
        return "all rows"
    return segment_value_name(spec, calibration.segment, calibration.value)


def to_sigma(p_value: float) -> float:
    """The standard score with a two-sided probability; 0 for a probability of 1."""
    from scipy.stats import norm  # not needed for serving

    return float(norm.isf(min(1.0, p_value) / 2))


def segment_calibrations(objective: str, labeled: LabeledRows) -> Iterator[SegmentCalibration]:
    """The calibration of an objective on all rows, and within each value of each segment.

    Values with fewer than MIN_EXPECTED expected positives or negatives are left out.
    """
    p, labels = labeled.probabilities, labeled.labels
    everything = {ALL_ROWS: np.zeros(len(p), np.int64)}
    for segment, values in (everything | labeled.segments).items():
        distinct, inverse = np.unique(values, return_inverse=True)
        rows, positives = np.bincount(inverse), np.bincount(inverse, labels)
        predicted = np.bincount(inverse, p)
        errors = _cumulative_errors(p, labels, inverse)
        deviations = np.sqrt(np.bincount(inverse, p * (1 - p)))
        for i in np.flatnonzero(np.minimum(predicted, rows - predicted) >= MIN_EXPECTED):
            yield SegmentCalibration(
                objective=objective,
                segment=segment,
                value=int(distinct[i]),
                rows=int(rows[i]),
                positives=int(positives[i]),
                predicted=float(predicted[i]),
                p_value=range_p_value(float(errors[i] / deviations[i])),
                error=float(errors[i]),
            )


def _cumulative_errors(p: Float64, labels: Labels, inverse: Int64) -> Float64:
    """The ECCE of each value, in outcomes, given the value (n) of each row."""
    order = np.lexsort((p, inverse))
    starts = np.flatnonzero(np.diff(inverse[order], prepend=-1))
    walk = np.cumsum((labels - p)[order])
    before = np.append(0.0, walk[starts[1:] - 1])
    high = np.maximum(np.maximum.reduceat(walk, starts) - before, 0)
    low = np.minimum(np.minimum.reduceat(walk, starts) - before, 0)
    return np.asarray(high - low)


def range_p_value(x: float) -> float:
    """The probability that the range of a Brownian motion over unit time is at least x."""
    if x < 0.5:  # the series converges slowly there, and the probability is 1 to eight digits
        return 1.0
    from scipy.stats import norm  # not needed for serving

    k = np.arange(1, SERIES_TERMS + 1)
    series = 8 * float(((-1.0) ** (k - 1) * k * norm.sf(k * x)).sum())
    return min(1.0, max(series, np.finfo(float).tiny))


def worst_segment(
    calibrations: Sequence[SegmentCalibration],
) -> tuple[SegmentCalibration, float] | None:
    """The segment with the least probable error, and its sigma corrected for their number.

    The correction is Bonferroni's, which also holds for segments that overlap. None if no segment
    is judged.
    """
    if not calibrations:
        return None
    worst = min(calibrations, key=lambda calibration: calibration.p_value)
    return worst, to_sigma(worst.p_value * len(calibrations))
