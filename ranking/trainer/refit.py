"""Refit of the live ranker on labels that became final after its training.

The promotion gate evaluates a ranker on days whose labels are all final, so a ranker that has just
passed is days old. Its refit continues the training day by day until the data ends, which may be
within a day: the labels are predicted, which refreshes the offsets of the calibration that the gate
accepted, and then learned. A later refit continues from an earlier one.
"""

import io
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_bytes

from etl.errors import UserError
from etl.spec.model import DataSpec
from etl.spec.units import SECONDS
from etl.tables.lake import Lake
from etl.tables.uri import StoragePath
from ranking.distillation.warm_start import freeze_as_before
from ranking.inputs.from_tables import load_teacher_history
from ranking.registry.export import TrainingSnapshot, export_ranker
from ranking.registry.manifest import (
    COMPILED_FILES,
    RankerManifest,
    RankerTraining,
    offsets_of,
    read_if_saved,
    read_manifest,
)
from ranking.registry.programs import NamedTensors, require_compiler
from ranking.registry.publication import publication
from ranking.registry.ranker import live_pointer, live_version, rankers_folder
from ranking.registry.records import RefitRecord, read_promotion_record, write_refit_record
from ranking.registry.tracking import register_ranker
from ranking.scoring.offsets import CalibrationOffsets, RankerCalibration
from ranking.scoring.outcome_values import value_evaluations
from ranking.scoring.predictions import SegmentedPredictions, concat_by_segment
from ranking.scoring.segment_calibration import SegmentEvaluation
from ranking.student.trained import new_student
from ranking.trainer.calibrate import predict_window, refresh_calibration
from ranking.trainer.label_days import days_with_labels, require_examples
from ranking.trainer.student_trainer import StudentTrainer, trained_parameters
from ranking.trainer.train import example_inputs
from training.data.label_window import LabelWindow
from training.data.reader import ExampleReader
from training.teacher.predictions import TeacherPredictions

log = logging.getLogger(__name__)


def refit_live_ranker(lake: Lake, surface: str, data_until: int) -> StoragePath:
    """Continue the training of a surface's live ranker until an epoch second, and make it live.

    A refit that ends within a day is replaced by the next one, so that a rollback returns to the
    end of a day.

    Returns:
        The folder of the live version: the new one, or the same if it has learned all labels.

    Raises:
        UserError: No ranker is live, it is of another spec or reads other inputs, it cannot be
            continued, or there are no examples of the latest days.
        TemporaryError: The live version was changed during the training.
    """
    folder = live_version(lake.root, surface)
    manifest = read_manifest(folder)
    training = _require_training(manifest, lake)
    if training.labels_until < data_until:
        is_superseded = bool(training.refit_of) and not lake.spec.is_day_end(training.labels_until)
        continued, folder = folder, _refit(lake, folder, manifest, training, data_until)
        manifest = read_manifest(folder)
        training = _require_training(manifest, lake)
        with publication(lake, surface, continued.name) as pointer:
            if is_superseded:
                pointer.replace_live(folder.name)
            else:
                pointer.promote(folder.name)
        register_ranker(lake, folder, manifest)
    record = RefitRecord(
        version=folder.name, data_until=data_until, newest_labels=training.newest_labels
    )
    write_refit_record(lake.root, surface, record)
    return folder


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


def _refit(
    lake: Lake,
    folder: StoragePath,
    manifest: RankerManifest,
    training: RankerTraining,
    data_until: int,
) -> StoragePath:
    """Train, calibrate and export the refit of a ranker; returns its folder."""
    compiled = set(COMPILED_FILES) <= set(manifest.file_hashes)
    if compiled:
        require_compiler()
    reader = ExampleReader.latest(
        lake, manifest.sequence, training.config.model.max_length, (manifest.surface,)
    )
    end_day = lake.spec.last_day_before(data_until)
    require_examples(reader, data_until)
    state, day_predictions = load_training_state(folder), load_day_predictions(folder, lake.spec)
    live = TrainingSnapshot(training, state, day_predictions)
    calibration = RankerCalibration(manifest.calibration, initial_offsets(folder, manifest))
    refit = continue_until(reader, live, calibration, data_until)
    promoted_version = training.refit_of or folder.name
    decision = read_promotion_record(lake.root, manifest.surface)
    gate = decision.reasons if decision and decision.version == promoted_version else training.gate
    record = refit.snapshot.record.model_copy(
        update={"refit_of": promoted_version, "gate": gate, "evaluation": refit.evaluation}
    )
    snapshot = replace(refit.snapshot, record=record)
    student = refit.trainer.averaged
    example = example_inputs(student, [day for day in reader.days() if day <= end_day])
    name = f"{version_time(lake.spec, data_until)}-s{training.config.seed}"
    path = rankers_folder(lake.root, manifest.surface) / name
    return export_ranker(path, student, refit.calibration, example, snapshot, compiled, folder)


def version_time(spec: DataSpec, data_until: int) -> str:
    """The part of a version's name for the end of its labels: `20260110`, or `20260110-1400`."""
    day = spec.last_day_before(data_until)
    if spec.is_day_end(data_until):
        return f"{day:%Y%m%d}"
    hours, rest = divmod(data_until - spec.day_start(day), SECONDS["h"])
    return f"{day:%Y%m%d}-{hours:02}{rest // SECONDS['m']:02}"


def initial_offsets(folder: StoragePath, manifest: RankerManifest) -> CalibrationOffsets:
    """The offsets of a ranker, or none yet if it was saved before they existed."""
    assert manifest.training is not None
    stored = offsets_of(folder, manifest)
    labels_until = manifest.training.labels_until
    return stored or CalibrationOffsets(surface=manifest.surface, labels_until=labels_until)


def load_training_state(folder: StoragePath) -> NamedTensors:
    """The state of a ranker's training. Raises UserError if it is damaged."""
    content = read_if_saved(folder, "training.safetensors")
    try:
        return from_bytes(content or b"")
    except SafetensorError:
        raise UserError(
            f"the state of the training in {folder} is damaged: run `gemline rank train` again"
        ) from None


def load_day_predictions(folder: StoragePath, spec: DataSpec) -> SegmentedPredictions | None:
    """What a refit that ends within a day predicted of the day's labels before it learned them.

    Refits of the day before it are included. None if there is nothing that a later one can judge
    with its own predictions.
    """
    content = read_if_saved(folder, "unfinished_day.npz")
    if content is None:
        return None
    with np.load(io.BytesIO(content), allow_pickle=False) as stored:
        return SegmentedPredictions.from_arrays(dict(stored), spec)


@dataclass(frozen=True)
class Refit:
    """A student whose training was continued, its state, and its calibration.

    `evaluation` judges its predictions of labels before they were learned, and those of the refits
    of the same day before it; None if the calibration had learned all of the labels already.
    """

    trainer: StudentTrainer
    snapshot: TrainingSnapshot
    calibration: RankerCalibration
    evaluation: SegmentEvaluation | None


def continue_until(
    reader: ExampleReader,
    snapshot: TrainingSnapshot,
    calibration: RankerCalibration,
    data_until: int,
) -> Refit:
    """Train day by day on the labels that became final since a snapshot, until an epoch second.

    The offsets of the calibration are refreshed on each day before its labels are learned, unless
    they have learned them already. There must be a day to learn.
    """
    spec, first_day = reader.lake.spec, snapshot.record.first_day
    prequential = _PrequentialPredictions.of_unfinished_day(snapshot, calibration, spec)
    for window, day in day_windows(reader.lake, snapshot.record.labels_until, data_until):
        days = [d for d in days_with_labels(reader, window) if d >= first_day]
        if not days:
            log.warning("%s: no examples have labels that became final on this day", day)
        trainer = continue_training(reader, snapshot, days, day)
        start = max(window.start, calibration.labels_until)
        if start < window.end:
            mixes_windows = snapshot.record.config.mix_windows
            held_out_window = LabelWindow(
                start, window.end, only_unlearned=True, mixes_windows=mixes_windows
            )
            predictions = predict_window(trainer.averaged, days, held_out_window)
            prequential.by_day.setdefault(day, []).append(predictions.calibrated(calibration))
            calibration = refresh_calibration(
                calibration, predictions, trainer.averaged, held_out_window
            )
        trainer.train(days, window)
        snapshot = trainer.snapshot(first_day, window.end)
    if not spec.is_day_end(data_until):
        snapshot = replace(snapshot, day_predictions=prequential.predictions(day))
    return Refit(trainer, snapshot, calibration, prequential.evaluation(data_until))


@dataclass
class _PrequentialPredictions:
    """Predictions of labels before they were learned, by the day on which these became final."""

    labels_from: int
    by_day: dict[date, list[SegmentedPredictions]]

    @classmethod
    def of_unfinished_day(
        cls, snapshot: TrainingSnapshot, calibration: RankerCalibration, spec: DataSpec
    ) -> "_PrequentialPredictions":
        """Those of earlier refits of a day, unless the calibration has learned labels since."""
        record, stored = snapshot.record, snapshot.day_predictions
        start = max(record.labels_until, calibration.labels_until)
        if stored is None or record.evaluation is None or start > record.labels_until:
            return cls(start, {})
        day = spec.last_day_before(record.labels_until)
        return cls(max(record.evaluation.labels_from, spec.day_start(day)), {day: [stored]})

    def predictions(self, *days: date) -> SegmentedPredictions | None:
        """Those of some days together; None if there are none."""
        parts = [part for day in days for part in self.by_day.get(day, ())]
        return concat_by_segment(parts) if parts else None

    def evaluation(self, labels_until: int) -> SegmentEvaluation | None:
        """How well they are calibrated; None if there are none."""
        predictions = self.predictions(*self.by_day)
        if predictions is None:
            return None
        return SegmentEvaluation(
            labels_from=self.labels_from,
            labels_until=labels_until,
            segments=tuple(predictions.segment_calibrations()),
            values=value_evaluations(predictions.outcomes),
        )


def day_windows(lake: Lake, labels_until: int, data_until: int) -> list[tuple[LabelWindow, date]]:
    """The labels that became final on each day between two epoch seconds, and the days."""
    spec, end = lake.spec, data_until
    windows = []
    while end > labels_until:
        day = spec.last_day_before(end)
        start = max(spec.day_start(day), labels_until)
        windows.append((LabelWindow(start, end), day))
        end = spec.day_start(day)
    return windows[::-1]


def continue_training(
    reader: ExampleReader, snapshot: TrainingSnapshot, days: Sequence[date], day: date
) -> StudentTrainer:
    """A trainer with the state of an earlier session, for the items seen by the end of a day."""
    config = snapshot.record.config
    torch.manual_seed(config.seed + day.toordinal())
    teacher_embeddings = load_teacher_history(reader.lake, config.model.input_limits)
    num_items = reader.items.num_seen_by(day)
    student = new_student(reader, config.model, num_items, teacher_embeddings)
    student.shared_gem = snapshot.record.shared_gem
    freeze_as_before(student, trained_parameters(snapshot.state), config.distillation)
    teacher = None
    if config.distillation.kind != "none":
        teacher = TeacherPredictions.of_gem(reader.lake, days)
    trainer = StudentTrainer(student, config, teacher)
    trainer.load_state_dict(snapshot.state)
    trainer.teacher_versions |= set(snapshot.record.teacher_versions)
    return trainer
