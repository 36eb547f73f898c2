"""The promotion gate: a new ranker goes live only if it is calibrated and better than the live one.

Both are loaded from their folders and evaluated on the latest days on which all labels are final.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date

import numpy as np
import torch

from etl.errors import UserError
from etl.spec.base import StrictModel
from etl.spec.model import DataSpec
from etl.spec.units import DaySplit, date_range
from etl.tables.lake import Lake
from ranking.registry.manifest import read_package
from ranking.registry.publication import publication
from ranking.registry.ranker import (
    ExportedRanker,
    latest_trained_pointer,
    live_pointer,
    live_version,
    load_ranker,
    load_ranker_before,
    validate_ranker,
    versions_before,
)
from ranking.registry.records import PromotionRecord, write_promotion_record
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
    ne_interval,
    paired_ne_difference,
)

log = logging.getLogger(__name__)
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


def promote_if_better(
    lake: Lake, surface: str, split: DaySplit, config: PromotionConfig
) -> PromotionDecision:
    """Promote the latest trained ranker of a surface if it passes the gate.

    The first ranker of a surface passes. If the live ranker cannot be evaluated, because it is
    damaged or of another spec, a calibrated ranker passes. If all versions to compare with have
    learned labels of the test days, none does, and neither does one that was rolled back.

    Raises:
        UserError: No ranker was trained, or the new one cannot be loaded.
        TemporaryError: The live version was changed during the evaluation.
    """
    state = live_pointer(lake.root, surface).read()
    latest = latest_trained_pointer(lake.root, surface).live_folder
    if latest is None or latest.name in live_and_gated_version(lake.root, surface):
        name = live_version(lake.root, surface).name
        return PromotionDecision(name, False, ("it is live already",))
    if state and latest.name in state.blocked:
        return PromotionDecision(latest.name, False, ("it was rolled back and is blocked",))
    candidate = validate_ranker(load_ranker(latest), lake.root, surface)
    evaluated = ranker_predictions(candidate, lake, split)
    segments = evaluated.segment_calibrations()
    live = load_live_for_comparison(lake, surface, split)
    live_predictions = None
    if isinstance(live, ExportedRanker):
        live_predictions = ranker_predictions(live, lake, split).predictions
    decision = compare_rankers(latest.name, evaluated.predictions, live_predictions, config)
    decision = require_calibrated_segments(decision, segments, lake.spec, config)
    if isinstance(live, NoComparison):
        promoted = state is None or (decision.promoted and live.allows_calibrated)
        decision = replace(decision, promoted=promoted, reasons=(live.reason, *decision.reasons))
    record = PromotionRecord(
        version=decision.version,
        promoted=decision.promoted,
        reasons=decision.reasons,
        segments=tuple(segments),
    )
    with publication(lake, surface, state.live if state else None) as pointer:
        write_promotion_record(lake.root, surface, record)  # first: no promotion lacks one
        if decision.promoted:
            pointer.promote(latest.name)
    return decision


def live_and_gated_version(lake: str, surface: str) -> tuple[str, ...]:
    """The live version and, if it is a refit, the version that passed the gate."""
    folder = live_pointer(lake, surface).live_folder
    if folder is None:
        return ()
    try:
        training = read_package(folder).manifest.training
    except UserError:  # a damaged ranker does not block the next
        return (folder.name,)
    refit_of = training.refit_of if training else None
    return (folder.name, refit_of) if refit_of else (folder.name,)


@dataclass(frozen=True)
class NoComparison:
    """Why there is no live ranker to compare with.

    With `allows_calibrated`, a calibrated candidate may still be promoted.
    """

    reason: str
    allows_calibrated: bool = True


def load_live_for_comparison(
    lake: Lake, surface: str, split: DaySplit
) -> ExportedRanker | NoComparison:
    """The live ranker, or the reason why a new one cannot be compared with it.

    It is the latest version that learned no label of the test days, with such offsets. Earlier ones
    that are damaged are skipped.
    """
    live = live_pointer(lake.root, surface).live_folder
    if live is None:
        return NoComparison("the first of its surface")
    test_start = lake.spec.day_start(split.test_first)
    for folder in (*versions_before(lake.root, surface, test_start, lake.spec), live):
        try:
            ranker = validate_ranker(load_ranker_before(folder, test_start), lake.root, surface)
        except UserError as error:
            if folder == live:
                return NoComparison(f"the live one cannot be evaluated: {error}")
            log.warning("skipped in the comparison: %s", error)
            continue
        if ranker.manifest.spec.hash != lake.spec.hash:
            return NoComparison("the first of its spec")
        if ranker.manifest.labels_until <= test_start:
            return ranker
    return NoComparison(
        "all retained versions of the live one have learned labels of the test days or are "
        "damaged, so that none can be compared: wait until the test days are later than one",
        allows_calibrated=False,
    )


def compare_rankers(
    version: str, candidate: Predictions, live: Predictions | None, config: PromotionConfig
) -> PromotionDecision:
    """Compare a ranker with the live one by their predictions for the same examples.

    It is promoted if it is calibrated, better for some objective and worse for none, outside noise.
    Without a live one it is promoted if it is calibrated, and the reasons have its own NE. Some
    objective must be evaluated.
    """
    names = [name for name in candidate.objectives if _has_enough_labels(candidate, name)]
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


def _has_enough_labels(predictions: Predictions, objective: str) -> bool:
    column = predictions.objectives.index(objective)
    labels = predictions.labels[predictions.label_mask[:, column], column]
    return bool(min(labels.sum(), (1 - labels).sum()) >= MIN_POSITIVES)


def _is_calibrated(ratio: ConfidenceInterval, tolerance: float) -> bool:
    """Whether the interval of a ratio overlaps with the tolerated one."""
    is_within = ratio.low <= 1 + tolerance and ratio.high >= 1 - tolerance
    return bool(np.isfinite(ratio.value)) and is_within
