"""The decision of the promotion gate, from the predictions of a new ranker and of the live one.

They are for the latest days on which all labels are final.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date

import numpy as np
import torch

from etl.spec.base import StrictModel
from etl.spec.model import DataSpec
from etl.spec.units import DaySplit, date_range
from etl.tables.lake import Lake
from ranking.registry.ranker import ExportedRanker
from ranking.scoring.calibration import logit
from ranking.scoring.predictions import BatchScores, SegmentedPredictions, predict_by_segment
from ranking.scoring.scorer import SCORE_ROWS, input_builder
from ranking.scoring.segment_calibration import (
    MAX_SIGMA,
    SegmentCalibration,
    describe_segment,
    to_sigma,
    worst_segment,
)
from training.data.batch import Batch, Shuffle
from training.data.label_window import LabelWindow
from training.evaluation.predictions import (
    ConfidenceInterval,
    Predictions,
    calibration_interval,
    has_enough_labels,
    ne_interval,
    paired_ne_difference,
)

MIN_POSITIVES = 10  # minimum positives and negatives to evaluate an objective


class PromotionConfig(StrictModel):
    """How far predictions may be off."""

    tolerance: float = 0.1
    """Maximum deviation of the ratio of predictions to outcomes from 1, on all rows."""
    segment_tolerance: float = 0.25
    """Maximum ECCE over outcomes, within a segment whose error is beyond noise."""


@dataclass(frozen=True)
class PromotionDecision:
    """Whether a ranker was promoted, and why."""

    version: str
    promoted: bool
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        """The decision and its reasons in one line."""
        decision = "promoted" if self.promoted else "not promoted"
        return f"{self.version} {decision}: {'; '.join(self.reasons)}"


def compare_rankers(
    version: str, candidate: Predictions, live: Predictions | None, config: PromotionConfig
) -> PromotionDecision:
    """Compare a ranker with the live one by their predictions for the same examples.

    It is promoted if it is calibrated, better for some objective and worse for none, outside noise.
    Without a live one it is promoted if it is calibrated, and the reasons have its own NE. Some
    objective must be evaluated.
    """
    names = [
        name for name in candidate.objectives if has_enough_labels(candidate, name, MIN_POSITIVES)
    ]
    ratios = {name: calibration_interval(candidate, name) for name in names}
    uncalibrated = [
        name for name, ratio in ratios.items() if not _is_calibrated(ratio, config.tolerance)
    ]
    reasons = [
        f"{name}: predictions / outcomes {ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
        for name, ratio in ratios.items()
    ]
    uncalibrated_reasons = [f"{name} is not calibrated" for name in uncalibrated]
    if not names:
        reasons.append(f"no objective has {MIN_POSITIVES} positives and negatives on the test days")
    if live is None:
        found = {name: ne_interval(candidate, name) for name in names}
        reasons += [
            f"{name}: NE {ne.value:.4f} [{ne.low:.4f}, {ne.high:.4f}]" for name, ne in found.items()
        ]
        passes = bool(names) and not uncalibrated
        return PromotionDecision(version, passes, (*reasons, *uncalibrated_reasons))
    differences = {name: paired_ne_difference([candidate], [live], name) for name in names}
    better = [name for name, difference in differences.items() if difference.high < 0]
    worse = [name for name, difference in differences.items() if difference.low > 0]
    reasons += [f"{name}: NE {difference}" for name, difference in differences.items()]
    reasons += uncalibrated_reasons + [f"{name} is worse" for name in worse]
    if not better:
        reasons.append("nothing is better outside noise")
    passes = bool(better) and not worse and not uncalibrated
    return PromotionDecision(version, passes, tuple(reasons))


def require_calibrated_segments(
    decision: PromotionDecision,
    segments: Sequence[SegmentCalibration],
    spec: DataSpec,
    config: PromotionConfig,
) -> PromotionDecision:
    """The decision, which becomes negative if a segment is not calibrated.

    The worst segment is the first of its reasons; the last one is why a ranker is not promoted.
    """
    worst = worst_segment(segments)
    if worst is None:
        return decision
    uncalibrated = [
        segment
        for segment in segments
        if to_sigma(segment.p_value * len(segments)) > MAX_SIGMA
        and not segment.relative_error <= config.segment_tolerance
    ]
    segment, sigma = worst
    named = describe_segment(spec, segment)
    first = f"worst of {len(segments)} segments: {named}, {sigma:.1f} sigma"
    last = [
        f"{describe_segment(spec, other)}: not calibrated, its error is {other.relative_error:.0%} "
        "of outcomes"
        for other in uncalibrated
    ]
    return replace(
        decision,
        promoted=decision.promoted and not uncalibrated,
        reasons=(first, *decision.reasons, *last),
    )


def ranker_predictions(ranker: ExportedRanker, lake: Lake, split: DaySplit) -> SegmentedPredictions:
    """A ranker's calibrated predictions for the test days, at the logged positions."""
    days = list(date_range(split.test_first, split.test_last))
    return predict_labels(ranker, lake, days, LabelWindow.for_test(split, lake.spec))


def predict_labels(
    ranker: ExportedRanker, lake: Lake, days: Sequence[date], window: LabelWindow
) -> SegmentedPredictions:
    """A ranker's calibrated predictions for the labels of a window, at the logged positions."""
    build_inputs = input_builder(ranker, lake)
    batches = build_inputs.reader.batches(days, window, SCORE_ROWS, Shuffle(None))

    def score(batch: Batch) -> BatchScores:
        inputs = build_inputs(batch)
        user_state = ranker.user_state(inputs.requests)
        scores = ranker.score_at_logged_positions(user_state, inputs.candidates)
        scores = scores[inputs.candidate_index.mask]
        return BatchScores(torch.from_numpy(logit(scores.probabilities)), scores.outcome_values)

    manifest = ranker.manifest
    return predict_by_segment(score, batches, manifest.spec, manifest.num_items)


def _is_calibrated(ratio: ConfidenceInterval, tolerance: float) -> bool:
    """Whether the interval of a ratio overlaps with the tolerated one."""
    is_within = ratio.low <= 1 + tolerance and ratio.high >= 1 - tolerance
    return bool(np.isfinite(ratio.value)) and is_within
