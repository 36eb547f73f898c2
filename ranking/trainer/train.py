"""Training of a surface's ranker: students with and without GEM, calibrated and exported.

`train_ranker` trains the ranker of a surface, `train_domain` the model of a domain from which
rankers may start. Both train students with `train_on_surfaces`.
"""

from collections.abc import Sequence
from datetime import date

import torch

from etl.errors import UserError
from etl.spec.units import DaySplit, date_range
from etl.tables.lake import Lake
from etl.tables.uri import StoragePath
from ranking.distillation import domain, warm_start
from ranking.distillation.coverage import warn_of_missing_predictions
from ranking.inputs.from_tables import RankerInputs, load_teacher_history
from ranking.registry.export import export_ranker
from ranking.registry.manifest import read_manifest
from ranking.registry.programs import require_compiler
from ranking.registry.ranker import latest_trained_pointer, rankers_folder
from ranking.registry.tracking import register_ranker
from ranking.scoring.predictions import SegmentedPredictions
from ranking.student.config import DistillationConfig, DomainTrainConfig, StudentTrainConfig
from ranking.student.trained import TrainedStudent, new_student
from ranking.trainer.calibrate import (
    fit_calibration,
    load_earlier_calibrations,
    pool_calibrations,
    predict_window,
)
from ranking.trainer.student_trainer import StudentTrainer
from training.data.batch import Shuffle
from training.data.label_window import ALL_LABELS, LabelWindow
from training.data.reader import ExampleReader
from training.distributed.process_group import process_group
from training.evaluation.predictions import evaluation_path
from training.teacher.embeddings import TeacherEmbeddings
from training.teacher.predictions import TeacherPredictions
from training.trainer.checkpoint import has_checkpoint
from training.trainer.trainer import load_train_state

EXAMPLE_ROWS = 64


def train_ranker(
    lake: Lake, surface: str, split: DaySplit, config: StudentTrainConfig, compiled: bool = False
) -> StoragePath:
    """Train a student from labels only and one with GEM, and export the latter as a ranker.

    Predictions of both on the test days are written to `evaluations`. `compiled` also compiles the
    ranker's programs for this kind of machine.

    Returns:
        The folder of the ranker.

    Raises:
        UserError: There is no compiler.
    """
    if compiled:
        require_compiler()
    prior = pool_calibrations(load_earlier_calibrations(lake, split.train_last))
    for name, variant in (("student", config.labels_only()), ("distilled", config)):
        trainer = train_on_surfaces(lake, (surface,), split, variant)
        student = trainer.averaged
        calibration = fit_calibration(lake, split, trainer, prior)
        evaluated = predict_test_days(lake, split, student).calibrated(calibration)
        evaluated.predictions.write(evaluation_path(lake.root, f"{name}-{surface}"), split)
    path = rankers_folder(lake.root, surface) / f"{split.train_last:%Y%m%d}-s{config.seed}"
    training = trainer.snapshot(split.train_first, lake.spec.day_end(split.train_last))
    example = example_inputs(student, list(date_range(split.test_first, split.test_last)))
    latest = latest_trained_pointer(lake.root, surface)
    folder = export_ranker(
        path, student, calibration, example, training, compiled, latest.live_folder
    )
    latest.promote(folder.name)
    register_ranker(lake, folder, read_manifest(folder))
    return folder


def train_domain(lake: Lake, name: str, split: DaySplit, config: DomainTrainConfig) -> StoragePath:
    """Train the model of a domain, from which its rankers may start or learn; returns its file."""
    surfaces = lake.spec.domains[name]
    embeddings = load_teacher_history(lake, config.model.input_limits)
    student = init_student(lake, surfaces, split, config, embeddings)
    return fit_domain_model(
        student, name, split, config, load_teacher_predictions(lake, surfaces, split, config)
    )


def fit_domain_model(
    student: TrainedStudent,
    name: str,
    split: DaySplit,
    config: DomainTrainConfig,
    teacher: TeacherPredictions | None,
) -> StoragePath:
    """Train a student as the model of a domain; returns its file.

    What it predicted of each example before it learned it is written beside.
    """
    reader, day = student.input_builder.reader, split.train_last
    trainer = StudentTrainer(student, config, teacher)
    days, window = training_rows(student, split)
    trainer.pretrain(days, window)
    predictions = trainer.train_prequentially(days, window)
    predictions.write(domain.domain_predictions_path(reader.lake, name, day), split)
    return domain.save_domain_model(reader, name, day, trainer.averaged)


def train_on_surfaces(
    lake: Lake, surfaces: tuple[str, ...], split: DaySplit, config: StudentTrainConfig
) -> StudentTrainer:
    """Train a student on the examples of one surface or of several."""
    teacher_embeddings = load_teacher_history(lake, config.model.input_limits)
    student = init_student(lake, surfaces, split, config, teacher_embeddings)
    return train_student(
        student, split, config, load_teacher_predictions(lake, surfaces, split, config)
    )


def load_teacher_predictions(
    lake: Lake, surfaces: tuple[str, ...], split: DaySplit, config: StudentTrainConfig
) -> TeacherPredictions | None:
    """The teacher's predictions for the training days; None if a student learns labels only.

    A warning says so if GEM has predicted few of their impressions. Raises UserError if it is to
    learn from the model of its domain, and there is none.
    """
    if config.distillation.kind == "none":
        return None
    if config.distillation.teacher == "domain":
        (surface,) = surfaces
        return domain.load_domain_predictions(lake, surface, split)
    days = list(date_range(split.train_first, split.train_last))
    teacher = TeacherPredictions.of_gem(lake, days)
    warn_of_missing_predictions(lake, surfaces, days, teacher)
    return teacher


def init_student(
    lake: Lake,
    surfaces: tuple[str, ...],
    split: DaySplit,
    config: StudentTrainConfig,
    teacher_embeddings: TeacherEmbeddings,
) -> TrainedStudent:
    """A new student: random weights, then those of its domain's model or of modules of GEM.

    Raises:
        UserError: The domain has no such model, or GEM no checkpoint or other sizes although
            modules are named.
    """
    torch.manual_seed(config.seed)
    reader = ExampleReader.latest(lake, None, config.model.max_length, surfaces)
    num_items = reader.items.num_seen_by(split.train_last)
    student = new_student(reader, config.model, num_items, teacher_embeddings)
    if config.distillation.warm_start_from == "domain":
        model = domain.load_domain_model(reader, split.train_last)
        domain.load_domain_weights(student, model)
    elif _shares_gem(lake, split, config.distillation):
        with process_group():
            gem, _ = load_train_state(lake, split.train_last)
            warm_start.copy_gem_modules(student, gem, config.distillation)
    return student


def _shares_gem(lake: Lake, split: DaySplit, config: DistillationConfig) -> bool:
    """Whether modules of GEM are named, or, by default, whether a GEM exists."""
    if config.shared_modules is None:
        return has_checkpoint(lake, split.train_last)
    return bool(config.shared_modules)


def train_student(
    student: TrainedStudent,
    split: DaySplit,
    config: StudentTrainConfig,
    teacher: TeacherPredictions | None,
) -> StudentTrainer:
    """Train a student on the training days."""
    trainer = StudentTrainer(student, config, teacher)
    days, window = training_rows(student, split)
    trainer.pretrain(days, window)
    trainer.train(days, window)
    return trainer


def training_rows(student: TrainedStudent, split: DaySplit) -> tuple[list[date], LabelWindow]:
    """The training days, and the labels that were final at their end."""
    days = list(date_range(split.train_first, split.train_last))
    return days, LabelWindow.for_training(split, student.input_builder.reader.lake.spec)


def example_inputs(student: TrainedStudent, days: Sequence[date]) -> RankerInputs:
    """Inputs of some impressions, for tracing programs and for test vectors.

    They are of the last of the days with impressions of the reader's surfaces; raises UserError if
    there is none.
    """
    reader = student.input_builder.reader
    for day in reversed(days):
        for batch in reader.batches([day], ALL_LABELS, EXAMPLE_ROWS, Shuffle(None)):
            return student.input_builder(batch)
    raise UserError(
        f"no impressions of {', '.join(reader.surfaces)} on the days to choose examples from: name "
        "days on which it had some"
    )


def predict_test_days(lake: Lake, split: DaySplit, student: TrainedStudent) -> SegmentedPredictions:
    """A student's predictions for the test days, not calibrated."""
    days = list(date_range(split.test_first, split.test_last))
    return predict_window(student, days, LabelWindow.for_test(split, lake.spec))
