"""Training of a surface's ranker: students with and without GEM, calibrated and exported.

`train_ranker` trains the ranker of a surface, `train_domain` the model of a domain from which
rankers may start. Both train students with `train_on_surfaces`.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date, timedelta

import numpy as np
import torch
from tqdm import tqdm

from etl.errors import UserError
from etl.spec.units import DaySplit, date_range
from etl.tables.lake import Lake
from etl.tables.uri import StoragePath, list_matching
from ranking.distillation import warm_start
from ranking.distillation.losses import DistillationLoss
from ranking.inputs.from_tables import load_teacher_history
from ranking.registry.export import export_ranker, require_compiler
from ranking.registry.manifest import read_manifest
from ranking.registry.ranker import latest_trained_pointer, rankers_folder
from ranking.scoring import calibration
from ranking.scoring.calibration import Calibration, PlattScaling
from ranking.scoring.scorer import SCORE_ROWS
from ranking.student.config import DistillationConfig, StudentTrainConfig
from ranking.student.model import TrainedStudent, new_student
from training.data.batch import Batch, NegativeSampling, Shuffle
from training.data.label_window import LabelWindow
from training.data.reader import ExampleReader
from training.distributed.process_group import process_group
from training.evaluation.predictions import Predictions, evaluation_path, predict
from training.teacher.embeddings import TeacherEmbeddings
from training.teacher.predictions import TeacherPredictions
from training.trainer.checkpoint import has_checkpoint
from training.trainer.step import EmaModel, per_objective
from training.trainer.trainer import load_train_state

EXAMPLE_ROWS = 64  # examples for tracing programs and for test vectors
DAY_GLOB = "[0-9]" * 8  # a version's name begins with the last day of its training
log = logging.getLogger(__name__)


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
    labels_only = config.model_copy(
        update={
            "distillation": DistillationConfig(kind="none", shared_modules=()),
            "model": config.model.without_teacher(),
        }
    )
    prior = pool_calibrations(load_earlier_calibrations(lake, split.train_last))
    for name, variant in (("student", labels_only), ("distilled", config)):
        student = train_on_surfaces(lake, (surface,), split, variant)
        calibrations = fit_calibration(lake, split, student, prior)
        predictions = apply_calibration(predict_test_days(lake, split, student), calibrations)
        predictions.write(evaluation_path(lake.root, f"{name}-{surface}"), split)
    example = student.input_builder(next(_test_batches(lake, split, student, EXAMPLE_ROWS)))
    path = rankers_folder(lake.root, surface) / f"{split.train_last:%Y%m%d}-s{config.seed}"
    folder = export_ranker(path, student, calibrations, example, compiled)
    latest_trained_pointer(lake.root, surface).promote(folder.name)
    return folder


def train_domain(lake: Lake, name: str, split: DaySplit, config: StudentTrainConfig) -> StoragePath:
    """Train the model of a domain, from which its rankers may start; returns its file."""
    model = train_on_surfaces(lake, lake.spec.domains[name], split, config)
    return warm_start.save_domain_model(model.input_builder.reader, name, split.train_last, model)


def train_on_surfaces(
    lake: Lake, surfaces: tuple[str, ...], split: DaySplit, config: StudentTrainConfig
) -> TrainedStudent:
    """Train a student on the examples of one surface or of several."""
    teacher_embeddings = load_teacher_history(lake, config.model.input_limits)
    student = init_student(lake, surfaces, split, config, teacher_embeddings)
    return train_student(student, split, config, load_teacher(lake, split, config))


def load_teacher(
    lake: Lake, split: DaySplit, config: StudentTrainConfig
) -> TeacherPredictions | None:
    """GEM's predictions for the training days; None if a student learns from labels only."""
    if config.distillation.kind == "none":
        return None
    return TeacherPredictions(lake, list(date_range(split.train_first, split.train_last)))


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
    seen_in_training = reader.items.seen_by(split.train_last)
    num_items = 1 + int(np.flatnonzero(seen_in_training).max(initial=0))
    student = new_student(reader, config.model, num_items, teacher_embeddings)
    if config.distillation.warm_start_from == "domain":
        weights = warm_start.load_domain_model(reader, split.train_last)
        warm_start.load_domain_weights(student, weights)
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
) -> TrainedStudent:
    """Train a student on the training days; it ends with averaged weights (EMA), in eval mode."""
    model, reader = student.student, student.input_builder.reader
    rates = _negative_sampling_rates(reader, config)
    loss = DistillationLoss.from_config(
        config.distillation, config.model.hidden[1], torch.tensor(rates).log(), teacher
    )
    optimizers = _optimizers(student, loss, config)
    average = EmaModel(model)
    teacher_note = "without GEM" if config.distillation.kind == "none" else "with GEM"
    progress = tqdm(
        _training_batches(reader, split, config, rates),
        desc=f"{', '.join(reader.surfaces)} student {teacher_note}",
        unit="batch",
        disable=None,
    )
    for batch in progress:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward(student.hidden(batch), model.head, batch)
        for optimizer in optimizers:
            optimizer.step()
        average.update_parameters(model)
        if loss.teacher_heads:
            progress.set_postfix(gem=f"x{loss.gradient_balancer.scale:.2f}", refresh=False)
    model.load_state_dict(average.module.state_dict())
    model.eval()
    return student


def _negative_sampling_rates(reader: ExampleReader, config: StudentTrainConfig) -> list[float]:
    return per_objective(
        config.negative_sampling_rate, reader.features.objectives, "--negative-sampling-rate"
    )


def _optimizers(
    student: TrainedStudent, loss: DistillationLoss, config: StudentTrainConfig
) -> list[torch.optim.Optimizer]:
    """The optimizer of dense weights, and that of tables unless they are frozen."""
    parameters = [*student.student.parameters(), *loss.teacher_heads.parameters()]
    dense = torch.optim.AdamW(
        [parameter for parameter in parameters if parameter.requires_grad],
        lr=config.dense_lr,
        weight_decay=config.weight_decay,
        fused=True,
    )
    if not any(parameter.requires_grad for parameter in student.tables.parameters()):
        return [dense]
    return [dense, student.tables.optimizer(config.embedding_lr)]


def _training_batches(
    reader: ExampleReader, split: DaySplit, config: StudentTrainConfig, rates: list[float]
) -> Iterator[Batch]:
    days = list(date_range(split.train_first, split.train_last))
    window = LabelWindow.for_training(split, reader.lake.spec)
    if config.negative_sampling_rate:
        sampling = NegativeSampling(tuple(rates), config.seed)
        window = replace(window, negative_sampling=sampling)
    for epoch in range(config.epochs):
        shuffle = Shuffle(config.seed * 1000 + epoch)
        yield from reader.batches(days, window, config.batch_rows, shuffle)


def _test_batches(
    lake: Lake, split: DaySplit, student: TrainedStudent, batch_rows: int
) -> Iterator[Batch]:
    days = list(date_range(split.test_first, split.test_last))
    window = LabelWindow.for_test(split, lake.spec)
    return student.input_builder.reader.batches(days, window, batch_rows, Shuffle(None))


def predict_test_days(lake: Lake, split: DaySplit, student: TrainedStudent) -> Predictions:
    """A student's predictions for the test days, not calibrated."""
    batches = _test_batches(lake, split, student, SCORE_ROWS)
    return predict(student.logits, batches, list(lake.spec.objectives))


def fit_calibration(
    lake: Lake, split: DaySplit, student: TrainedStudent, prior: Mapping[str, PlattScaling]
) -> dict[str, Calibration]:
    """Fit calibrations on labels that became final after training, which no model has learned.

    With few positives a calibration stays close to its prior; without a calibration day the prior
    is returned.
    """
    objectives = list(lake.spec.objectives)
    if split.calibration is None:
        return {name: prior.get(name, PlattScaling()) for name in objectives}
    label_delay = timedelta(days=lake.spec.label_maturity_days)
    days = list(date_range(split.calibration - label_delay, split.calibration))
    window = LabelWindow.for_calibration(split, lake.spec)
    batches = student.input_builder.reader.batches(days, window, SCORE_ROWS, Shuffle(None))
    return fit_per_objective(predict(student.logits, batches, objectives), prior)


def fit_per_objective(
    predictions: Predictions, prior: Mapping[str, PlattScaling]
) -> dict[str, Calibration]:
    """Fit a calibration for each objective on predictions and their labels."""
    logits = calibration.logit(predictions.probabilities)
    calibrations: dict[str, Calibration] = {}
    for i, name in enumerate(predictions.objectives):
        has_label = predictions.label_mask[:, i]
        labels = predictions.labels[has_label, i]
        calibrations[name] = calibration.fit_calibrator(
            logits[has_label, i], labels, prior=prior.get(name)
        )
    return calibrations


def apply_calibration(
    predictions: Predictions, calibrations: Mapping[str, Calibration]
) -> Predictions:
    """Predictions with calibrated probabilities."""
    logits = calibration.logit(predictions.probabilities)
    calibrated = calibration.calibrate(calibrations, logits, predictions.objectives)
    return replace(predictions, probabilities=calibrated)


def load_earlier_calibrations(lake: Lake, train_last: date) -> list[dict[str, Calibration]]:
    """The calibrations of each surface's latest ranker that was trained until an earlier day.

    A damaged ranker is skipped with a warning.
    """
    calibrations = []
    for surface in lake.spec.ad_surfaces:
        folder = rankers_folder(lake.root, surface)
        names = [path.name for path in list_matching(folder, f"{DAY_GLOB}-*") if path.is_dir()]
        earlier = sorted(name for name in names if name[:8] < f"{train_last:%Y%m%d}")
        if not earlier:
            continue
        try:
            calibrations.append(read_manifest(folder / earlier[-1]).calibration)
        except UserError as error:
            log.warning("skipped in the prior of the calibration: %s", error)
    return calibrations


def pool_calibrations(calibrations: Sequence[Mapping[str, Calibration]]) -> dict[str, PlattScaling]:
    """The mean Platt scaling of each objective over surfaces: geometric for slopes."""
    by_objective: dict[str, list[PlattScaling]] = {}
    for surface_calibrations in calibrations:
        for name, fitted in surface_calibrations.items():
            if isinstance(fitted, PlattScaling):
                by_objective.setdefault(name, []).append(fitted)
    return {
        name: PlattScaling(
            slope=float(np.exp(np.mean([np.log(scaling.slope) for scaling in scalings]))),
            intercept=float(np.mean([scaling.intercept for scaling in scalings])),
        )
        for name, scalings in by_objective.items()
    }
