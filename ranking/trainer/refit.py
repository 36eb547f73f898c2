"""Refit of the live ranker on labels that became final after its training.

The promotion gate evaluates a ranker on days whose labels are all final, so a ranker that has just
passed is days old. Its refit continues the training day by day until the data ends, which may be
within a day: the labels are predicted, which refreshes the offsets of the calibration that the gate
accepted, and then learned. A later refit continues from an earlier one.
"""

import logging
from dataclasses import replace

from etl.errors import UserError
from etl.spec.model import DataSpec
from etl.spec.units import SECONDS
from etl.tables.lake import Lake
from etl.tables.uri import StoragePath
from ranking.registry.export import export_ranker
from ranking.registry.manifest import (
    COMPILED_FILES,
    RankerManifest,
    RankerTraining,
    read_manifest,
)
from ranking.registry.programs import require_compiler
from ranking.registry.publication import publication
from ranking.registry.ranker import live_pointer, live_version, rankers_folder
from ranking.registry.records import (
    PromotionRecord,
    RefitRecord,
    read_promotion_record,
    write_refit_record,
)
from ranking.registry.tracking import register_ranker
from ranking.trainer.continuation import Refit, continue_ranker
from ranking.trainer.train import example_inputs

log = logging.getLogger(__name__)


def refit_live_ranker(lake: Lake, surface: str, data_until: int) -> StoragePath:
    """Continue the training of a surface's live ranker until an epoch second, and make it live.

    A refit that ends within a day is replaced by the next one, which ends at the end of that day at
    the latest, so that a rollback returns to the end of a day.

    Returns:
        The folder of the live version: the new one, or the same if it has learned all labels.

    Raises:
        UserError: No ranker is live, it is of another spec or reads other inputs, it cannot be
            continued, or there are no examples of the latest days.
        TemporaryError: The live version was changed during the training.
    """
    folder = live_version(lake.root, surface)
    training = _require_training(read_manifest(folder), lake)
    for end in _refit_ends(lake.spec, training, data_until):
        folder = _publish_refit(lake, surface, folder, end)
    training = _require_training(read_manifest(folder), lake)
    record = RefitRecord(
        version=folder.name, data_until=data_until, newest_labels=training.newest_labels
    )
    write_refit_record(lake.root, surface, record)
    return folder


def _refit_ends(spec: DataSpec, training: RankerTraining, data_until: int) -> list[int]:
    """The epoch seconds at which the refits end that continue a training until `data_until`.

    A refit that ended within a day is first continued to the end of that day.
    """
    if training.labels_until >= data_until:
        return []
    day_end = spec.day_end(spec.last_day_before(training.labels_until))
    if _is_superseded(spec, training) and day_end < data_until:
        return [day_end, data_until]
    return [data_until]


def _is_superseded(spec: DataSpec, training: RankerTraining) -> bool:
    """Whether the next refit replaces a version: a refit that ended within a day."""
    return bool(training.refit_of) and not spec.is_day_end(training.labels_until)


def _publish_refit(lake: Lake, surface: str, folder: StoragePath, end: int) -> StoragePath:
    """Make the refit of the live version until an epoch second live; returns its folder."""
    manifest = read_manifest(folder)
    training = _require_training(manifest, lake)
    refit = continue_ranker(lake, folder, manifest, training, end)
    decision = read_promotion_record(lake.root, surface)
    refit_folder = export_refit(lake, folder, manifest, refit, decision)
    with publication(lake, surface, folder.name) as pointer:
        if _is_superseded(lake.spec, training):
            pointer.replace_live(refit_folder.name)
        else:
            pointer.promote(refit_folder.name)
    register_ranker(lake, refit_folder, read_manifest(refit_folder))
    return refit_folder


def blocked_refit(lake: str, surface: str) -> str | None:
    """The latest refit of a surface's live ranker that was rolled back and is blocked; or None.

    A later refit would learn the labels of the blocked one, too.
    """
    pointer = live_pointer(lake, surface)
    state = pointer.read()
    if state is None or not state.blocked:
        return None
    training = read_manifest(pointer.folder / state.live).training
    promoted = (training and training.refit_of) or state.live
    for version in reversed(state.blocked):
        try:
            blocked = read_manifest(pointer.folder / version).training
        except UserError:  # removed or damaged
            continue
        if blocked and blocked.refit_of == promoted:
            return version
    return None


def _require_training(manifest: RankerManifest, lake: Lake) -> RankerTraining:
    """The record of a ranker's training. Raises UserError if it cannot be continued."""
    if manifest.spec.hash != lake.spec.hash:
        raise UserError(
            f"the live ranker of {manifest.surface} was trained with spec {manifest.spec.hash}, "
            f"now it is {lake.spec.hash}: run `gemline rank train`, then `gemline rank promote`"
        )
    changed = manifest.changed_inputs(lake.spec)
    if changed:
        raise UserError(
            f"the live ranker of {manifest.surface} was trained with other {', '.join(changed)} "
            "than the spec now has: run `gemline rank train`, then `gemline rank promote`, or "
            "restore them in the spec"
        )
    if manifest.training is None:
        raise UserError(
            f"the live ranker of {manifest.surface} was saved without the state of its training: "
            "run `gemline rank train`, then `gemline rank promote`"
        )
    return manifest.training


def export_refit(
    lake: Lake,
    folder: StoragePath,
    manifest: RankerManifest,
    refit: Refit,
    decision: PromotionRecord | None,
) -> StoragePath:
    """Save the refit of a ranker with the gate's latest decision; returns the new folder."""
    compiled = set(COMPILED_FILES) <= set(manifest.file_hashes)
    if compiled:
        require_compiler()
    assert manifest.training is not None
    promoted_version = manifest.training.refit_of or folder.name
    gate, gate_segments = manifest.training.gate, manifest.training.gate_segments
    if decision and decision.version == promoted_version:
        gate, gate_segments = decision.reasons, decision.segments
    record = refit.snapshot.record.model_copy(
        update={
            "refit_of": promoted_version,
            "gate": gate,
            "gate_segments": gate_segments,
            "evaluation": refit.evaluation,
        }
    )
    student, labels_until = refit.trainer.averaged, record.labels_until
    reader, end_day = student.input_builder.reader, lake.spec.last_day_before(labels_until)
    example = example_inputs(student, [day for day in reader.days() if day <= end_day])
    name = f"{version_time(lake.spec, labels_until)}-s{record.config.seed}"
    path = rankers_folder(lake.root, manifest.surface) / name
    snapshot = replace(refit.snapshot, record=record)
    return export_ranker(path, student, refit.calibration, example, snapshot, compiled, folder)


def version_time(spec: DataSpec, data_until: int) -> str:
    """The part of a version's name for the end of its labels: `20260110`, or `20260110-1400`."""
    day = spec.last_day_before(data_until)
    if spec.is_day_end(data_until):
        return f"{day:%Y%m%d}"
    hours, rest = divmod(data_until - spec.day_start(day), SECONDS["h"])
    return f"{day:%Y%m%d}-{hours:02}{rest // SECONDS['m']:02}"
