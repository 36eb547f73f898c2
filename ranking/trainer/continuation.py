"""Continuation of a ranker's training and calibration on labels that became final since.

Day by day, labels are predicted, which refreshes the offsets of the calibration, and then learned.
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
from etl.tables.lake import Lake
from etl.tables.uri import StoragePath
from ranking.distillation import domain
from ranking.distillation.warm_start import freeze_as_before
from ranking.inputs.from_tables import load_teacher_history
from ranking.registry.export import TrainingSnapshot
from ranking.registry.manifest import RankerManifest, RankerTraining, offsets_of, read_if_saved
from ranking.registry.programs import NamedTensors
from ranking.scoring.offsets import CalibrationOffsets, RankerCalibration
from ranking.scoring.outcome_values import value_evaluations
from ranking.scoring.predictions import SegmentedPredictions, concat_by_segment
from ranking.scoring.segment_calibration import SegmentEvaluation
from ranking.student.trained import new_student
from ranking.trainer.calibrate import predict_window, refresh_calibration
from ranking.trainer.label_days import days_with_labels, require_examples
from ranking.trainer.student_trainer import StudentTrainer, trained_parameters
from training.data.label_window import LabelWindow
from training.data.reader import ExampleReader
from training.teacher.predictions import TeacherPredictions

log = logging.getLogger(__name__)


def continue_ranker(
    lake: Lake,
    folder: StoragePath,
    manifest: RankerManifest,
    training: RankerTraining,
    data_until: int,
    offsets: CalibrationOffsets | None = None,
) -> "Refit":
    """Continue the training and the calibration of a saved ranker until an epoch second.

    The calibration is continued from `offsets`, by default the ranker's latest ones.
    """
    reader = ExampleReader.latest(
        lake, manifest.sequence, training.config.model.max_length, (manifest.surface,)
    )
    require_examples(reader, training.labels_until, data_until)
    state, day_predictions = load_training_state(folder), load_day_predictions(folder, lake.spec)
    snapshot = TrainingSnapshot(training, state, day_predictions)
    offsets = offsets or initial_offsets(folder, manifest)
    calibration = RankerCalibration(manifest.calibration, offsets)
    return continue_until(reader, snapshot, calibration, data_until)


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
    teacher_embeddings = load_teacher_history(
        reader.lake, config.model.input_limits, snapshot.record.compressor_version
    )
    num_items = reader.items.num_seen_by(day)
    student = new_student(reader, config.model, num_items, teacher_embeddings)
    student.shared_gem = snapshot.record.shared_gem
    freeze_as_before(student, trained_parameters(snapshot.state), config.distillation)
    trainer = StudentTrainer(student, config, _teacher_predictions(reader, snapshot.record, days))
    trainer.load_state_dict(snapshot.state)
    trainer.teacher_versions |= set(snapshot.record.teacher_versions)
    return trainer


def _teacher_predictions(
    reader: ExampleReader, record: RankerTraining, days: Sequence[date]
) -> TeacherPredictions | None:
    """The predictions of the teacher of a training for some days; None if labels alone are learned.

    The model of a domain has predicted the examples of the first training only.
    """
    distillation = record.config.distillation
    if distillation.kind == "none":
        return None
    if distillation.teacher == "domain":
        (surface,) = reader.surfaces
        return domain.load_learned_predictions(reader.lake, surface, record.teacher_versions)
    return TeacherPredictions.of_gem(reader.lake, days)
