"""The promotion gate: a new ranker goes live only if it is calibrated and better than the live one.

Both are evaluated on the latest days on which all labels are final, and have learned labels up to
the same time: the live one may be a refit, which has learned labels that became final after the
training of the new one.
"""

import logging
from dataclasses import dataclass, replace

from etl.errors import UserError
from etl.spec.model import DataSpec
from etl.spec.units import DaySplit, date_range
from etl.tables.lake import Lake
from etl.tables.uri import StoragePath
from ranking.registry.manifest import read_manifest, read_package
from ranking.registry.promotion import (
    PromotionConfig,
    PromotionDecision,
    compare_rankers,
    ranker_predictions,
    require_calibrated_segments,
)
from ranking.registry.publication import publication
from ranking.registry.ranker import (
    ExportedRanker,
    latest_trained_pointer,
    live_pointer,
    live_version,
    load_ranker_before,
    validate_ranker,
    versions_before,
)
from ranking.registry.records import PromotionRecord, write_promotion_record
from ranking.registry.tracking import register_ranker
from ranking.scoring.predictions import SegmentedPredictions
from ranking.trainer.calibrate import predict_window
from ranking.trainer.continuation import continue_ranker
from ranking.trainer.refit import export_refit
from training.data.label_window import LabelWindow

log = logging.getLogger(__name__)


def promote_if_better(
    lake: Lake, surface: str, split: DaySplit, config: PromotionConfig
) -> PromotionDecision:
    """Promote the latest trained ranker of a surface if it passes the gate.

    The first ranker of a surface passes. If the live ranker is damaged, or of another spec or other
    model inputs, so that it cannot be refit, a calibrated ranker passes. If all versions to compare
    with have learned labels of the test days, none does. A ranker is refused if it or its
    calibration has learned such labels, if it was trained with other model inputs than the spec
    has, or if it was rolled back. A ranker that replaces a refit goes live with the labels that the
    refit has learned.

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
    record = _judge(lake, surface, latest, split, config)
    versions = [latest]
    if state and record.promoted:
        refit = _refit_like_live(lake, latest, latest.parent / state.live, record)
        versions += [refit] if refit else []
    with publication(lake, surface, state.live if state else None) as pointer:
        write_promotion_record(lake.root, surface, record)  # first: no promotion lacks one
        if record.promoted:
            pointer.promote(*(folder.name for folder in versions))
    for folder in versions[1:]:
        register_ranker(lake, folder, read_manifest(folder))
    return PromotionDecision(record.version, record.promoted, record.reasons)


def _judge(
    lake: Lake, surface: str, folder: StoragePath, split: DaySplit, config: PromotionConfig
) -> PromotionRecord:
    """The decision on the ranker of a folder, and its calibration by segment."""
    test_start = lake.spec.day_start(split.test_first)
    candidate = validate_ranker(load_ranker_before(folder, test_start), lake.root, surface)
    reason = _reason_to_refuse(candidate, lake, split)
    if reason:
        return PromotionRecord(version=folder.name, promoted=False, reasons=(reason,), segments=())
    live = load_live_for_comparison(lake, surface, split)
    live_predictions = labels_until = None
    if isinstance(live, ExportedRanker):
        live_predictions = ranker_predictions(live, lake, split).predictions
        labels_until = live.manifest.labels_until
    evaluated = candidate_predictions(lake, folder, candidate, labels_until, split)
    segments = evaluated.segment_calibrations()
    decision = compare_rankers(folder.name, evaluated.predictions, live_predictions, config)
    decision = require_calibrated_segments(decision, segments, lake.spec, config)
    if isinstance(live, NoComparison):
        promoted = live.is_first or (decision.promoted and live.allows_calibrated)
        decision = replace(decision, promoted=promoted, reasons=(live.reason, *decision.reasons))
    return PromotionRecord(
        version=decision.version,
        promoted=decision.promoted,
        reasons=decision.reasons,
        segments=tuple(segments),
    )


def _reason_to_refuse(candidate: ExportedRanker, lake: Lake, split: DaySplit) -> str | None:
    """Why a new ranker, loaded with offsets from before the test days, is refused; or None."""
    manifest = candidate.manifest
    changed = manifest.changed_inputs(lake.spec)
    if changed:
        return (
            f"it was trained with other {', '.join(changed)} than the spec now has: run "
            "`gemline rank train` first"
        )
    later_days = f"test it on later days than {split.test_first}"
    if manifest.labels_until > lake.spec.day_start(split.test_first):
        return f"it has learned labels of the test days: {later_days}"
    if manifest.has_calibration_offsets and candidate.offsets is None:
        return f"its calibration has learned labels of the test days: {later_days}"
    return None


def candidate_predictions(
    lake: Lake,
    folder: StoragePath,
    candidate: ExportedRanker,
    labels_until: int | None,
    split: DaySplit,
) -> SegmentedPredictions:
    """A new ranker's calibrated predictions for the test days, by the offsets that it has.

    If the ranker to compare with has learned labels until a later epoch second, the training of the
    new one is continued until then, in memory: the gate compares recipes, not days of training.
    """
    training = candidate.manifest.training
    if training is None or labels_until is None or labels_until <= training.labels_until:
        return ranker_predictions(candidate, lake, split)
    refit = continue_ranker(
        lake, folder, candidate.manifest, training, labels_until, candidate.offsets
    )
    days = list(date_range(split.test_first, split.test_last))
    window = LabelWindow.for_test(split, lake.spec)
    return predict_window(refit.trainer.averaged, days, window).calibrated(refit.calibration)


def _refit_like_live(
    lake: Lake, folder: StoragePath, live_folder: StoragePath, record: PromotionRecord
) -> StoragePath | None:
    """The folder of a new ranker's refit on the labels that the live ranker has learned.

    Without it, ads of the days since the training would be unknown until the next refit. None if
    the live one has learned no later labels, or cannot be read.
    """
    manifest = read_manifest(folder)
    training = manifest.training
    try:
        live = read_manifest(live_folder)
    except UserError as error:  # a damaged ranker does not block the next
        log.warning("%s goes live without a refit: %s", folder.name, error)
        return None
    if training is None or live.labels_until <= training.labels_until:
        return None
    latest = replace(lake, pinned_versions={})  # pins may be older than the live one's labels
    refit = continue_ranker(latest, folder, manifest, training, live.labels_until)
    return export_refit(latest, folder, manifest, refit, record)


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

    With `allows_calibrated`, a calibrated candidate may still be promoted; the first ranker of a
    surface is promoted in any case.
    """

    reason: str
    allows_calibrated: bool = True
    is_first: bool = False


def load_live_for_comparison(
    lake: Lake, surface: str, split: DaySplit
) -> ExportedRanker | NoComparison:
    """The live ranker, or the reason why a new one cannot be compared with it.

    It is the latest version that learned no label of the test days, with such offsets. Earlier ones
    that are damaged are skipped. A live one that cannot be refit under the spec is not compared: a
    new ranker within noise of it has to replace it.
    """
    live = live_pointer(lake.root, surface).live_folder
    if live is None:
        return NoComparison("the first of its surface", is_first=True)
    reason = _reason_not_to_compare(live, lake.spec)
    if reason:
        return NoComparison(reason)
    test_start = lake.spec.day_start(split.test_first)
    for folder in (*versions_before(lake.root, surface, test_start, lake.spec), live):
        try:
            ranker = validate_ranker(load_ranker_before(folder, test_start), lake.root, surface)
        except UserError as error:
            if folder == live:
                return NoComparison(f"the live one cannot be evaluated: {error}")
            log.warning("skipped in the comparison: %s", error)
            continue
        if ranker.manifest.labels_until <= test_start:
            return ranker
    return NoComparison(
        "all retained versions of the live one have learned labels of the test days or are "
        "damaged, so that none can be compared: wait until the test days are later than one",
        allows_calibrated=False,
    )


def _reason_not_to_compare(live: StoragePath, spec: DataSpec) -> str | None:
    """Why a live ranker is not compared with a new one: it cannot be refit. None if it can be."""
    try:
        manifest = read_manifest(live)
    except UserError:  # an earlier version may be compared
        return None
    if manifest.spec.hash != spec.hash:
        return "the first of its spec"
    changed = manifest.changed_inputs(spec)
    return f"the first with other {', '.join(changed)}" if changed else None
