"""Trainings of students of one size with several distillation options, each run once and kept."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from benchmarks.harness import BENCH_SIMULATOR, SIMULATOR_SPEC
from benchmarks.pipelines import BENCH_DAYS, simulated_tables
from benchmarks.studies.position_truth import share_of_logged_outcomes
from benchmarks.studies.shuffled_teacher import (
    StudentTrialConfig,
    train_domain,
    train_on_surfaces,
)
from benchmarks.studies.trials import digest_of, model_inputs, symlinked_lake, trial_path
from dags.pipeline import latest_mature_split
from etl.array_types import Float64
from etl.spec import load_spec
from etl.spec.units import DayRange, DaySplit, date_range, parse_date_range
from etl.tables.lake import Lake
from ranking.report.data import true_probabilities
from ranking.scoring.offsets import RankerCalibration
from ranking.scoring.predictions import SegmentedPredictions
from ranking.student.config import DomainTrainConfig, StudentTrainConfig
from ranking.trainer.calibrate import fit_calibration, fit_per_objective
from ranking.trainer.train import predict_test_days
from training.config import TrainConfig
from training.data.batch import Shuffle
from training.data.label_window import LabelWindow
from training.data.reader import INPUT_TABLES, ExampleReader
from training.distributed.process_group import process_group
from training.evaluation.metrics import ne_by_objective
from training.evaluation.predictions import Predictions, concat_predictions, predict
from training.teacher.embeddings import load_teacher_embeddings
from training.teacher.outputs import write_teacher_outputs
from training.teacher.predictions import TeacherPredictions
from training.trainer import checkpoint
from training.trainer.trainer import load_train_state, train_days

TrainingChange = Mapping[str, Any]  # fields of StudentTrainConfig
SELECTION_SEED = 1007
SELECTION_DAYS_EARLIER = 2  # days from selection of hyperparameters to the reported days
CANDIDATE_WEIGHTS = (0.3, 1.0, 3.0)  # of plain distillation
CANDIDATE_RATIOS = (0.03, 0.1, 0.3, 1.0)  # of the auxiliary head's gradient
BATCH_ROWS = 2048
TEACHER_HISTORY_LENGTH = 32


def transfer_change(**options: object) -> TrainingChange:
    """Options of distillation; options that are not given are off."""
    off = {
        "gradient_ratio": 1.0,
        "use_adapter": False,
        "shared_modules": (),
        "pretraining_epochs": 0,
    }
    return {"distillation": off | options}


LABELS_ONLY_CHANGE = transfer_change(kind="none")


def everything(gradient_ratio: float, **options: object) -> TrainingChange:
    """All options that are on by default, and others."""
    default = {"use_adapter": True, "shared_modules": None, "pretraining_epochs": 1}
    return transfer_change(gradient_ratio=gradient_ratio, **default | options)


@dataclass(frozen=True)
class TransferTrials:
    """The lake of the bench data, with a GEM trained day by day, and its outputs."""

    lake: Lake
    raw_logs: str
    split: DaySplit
    folder: Path

    @classmethod
    def of(cls, work: Path) -> "TransferTrials":
        """The trials of a work folder; logs, tables, GEM and its outputs are built if missing.

        A GEM of another configuration or other inputs has a folder of its own, with the trials that
        learn from it.
        """
        work, spec = work.resolve(), load_spec(SIMULATOR_SPEC)
        paths = simulated_tables(work, BENCH_SIMULATOR, BENCH_DAYS)
        split = latest_mature_split(spec, *parse_date_range(BENCH_DAYS))
        config = TrainConfig(max_length=2048)
        tables = Lake(paths.lake, spec)
        identity = digest_of([config.model_dump_json(), model_inputs(tables, INPUT_TABLES)])
        folder = work / "transfer" / identity
        lake = symlinked_lake(tables, folder / "lake")
        with process_group():
            if not checkpoint.has_checkpoint(lake, split.train_last):
                train_days(lake, (split.train_first, split.train_last), config)
            # No GEM is earlier than the first day.
            complete_teacher_outputs(lake, (split.train_first + timedelta(days=1), split.test_last))
        return cls(lake, paths.raw, split, folder / "trials")

    @property
    def objectives(self) -> list[str]:
        """The objectives of the spec."""
        return list(self.lake.spec.objectives)

    @cached_property
    def selection_split(self) -> DaySplit:
        """The split on which hyperparameters are selected."""
        shift = timedelta(days=SELECTION_DAYS_EARLIER)
        names = ("train_last", "calibration", "test_first", "test_last")
        earlier = {name: getattr(self.split, name) - shift for name in names}
        return self.split.model_copy(update=earlier)

    @cached_property
    def distillation_weight(self) -> float:
        """The best weight of plain distillation."""
        changes = {w: transfer_change(kind="plain", weight=w) for w in CANDIDATE_WEIGHTS}
        return self._select_best(changes)

    @cached_property
    def auxiliary_gradient_ratio(self) -> float:
        """The best ratio of the auxiliary head's gradient to that of the labels, in "all"."""
        return self._select_best({ratio: everything(ratio) for ratio in CANDIDATE_RATIOS})

    @cached_property
    def ratio_of_each_objective(self) -> float:
        """The best ratio in "all" where the gradients of each objective are balanced."""
        changes = {r: everything(r, gradient_balance="objective") for r in CANDIDATE_RATIOS}
        return self._select_best(changes)

    @cached_property
    def logged_share(self) -> Float64:
        """The share (O) of outcomes that are logged in time to count as labels."""
        return share_of_logged_outcomes(self.lake, Path(self.raw_logs))

    def selected_options(self) -> dict[str, float]:
        """The selected hyperparameters."""
        return {
            "plain weight": self.distillation_weight,
            "auxiliary ratio": self.auxiliary_gradient_ratio,
            "auxiliary ratio of each objective": self.ratio_of_each_objective,
        }

    def variants(self) -> dict[str, TrainingChange]:
        """All distillation options, separately and combined, with controls.

        Controls are a shuffled teacher, and a second pass over the labels.
        """
        ratio = self.auxiliary_gradient_ratio
        plain = {"kind": "plain", "weight": self.distillation_weight}
        head = {"kind": "auxiliary", "gradient_ratio": ratio}
        adapted = {**head, "use_adapter": True}
        reads_teacher = {"model": {"teacher_history_length": TEACHER_HISTORY_LENGTH}}
        sharing = {"kind": "none", "shared_modules": None}
        pretraining = {"kind": "plain", "weight": 0.0, "pretraining_epochs": 1}
        shuffled_labels_only = transfer_change(kind="none", shuffle_teacher=True)
        return {
            "labels only": LABELS_ONLY_CHANGE,
            "labels only, two passes": {**LABELS_ONLY_CHANGE, "epochs": 2},
            "plain distillation": transfer_change(**plain),
            "plain distillation, shuffled": transfer_change(**plain, shuffle_teacher=True),
            "auxiliary head": transfer_change(**head),
            "auxiliary head, shuffled": transfer_change(**head, shuffle_teacher=True),
            "auxiliary head, adapter": transfer_change(**adapted),
            "representation": {**LABELS_ONLY_CHANGE, **reads_teacher},
            "representation, shuffled": {**shuffled_labels_only, **reads_teacher},
            "sharing": transfer_change(**sharing),
            "sharing, shuffled": transfer_change(**sharing, shuffle_teacher=True),
            "pretraining": transfer_change(**pretraining),
            "pretraining, shuffled": transfer_change(**pretraining, shuffle_teacher=True),
            "all": everything(ratio),
            "all, balanced by objective": everything(
                self.ratio_of_each_objective, gradient_balance="objective"
            ),
        }

    def hierarchical_variants(self) -> dict[str, TrainingChange]:
        """Students that start or learn from the model of their domain, which learned from GEM."""
        ratio = self.auxiliary_gradient_ratio
        both = {"warm_start_from": "domain", "teacher": "domain"}
        return {
            "weights of the domain": everything(ratio, warm_start_from="domain"),
            "scores of the domain": everything(ratio, teacher="domain"),
            "weights and scores of the domain": everything(ratio, **both),
            "scores of the domain, shuffled": everything(
                ratio, teacher="domain", shuffle_teacher=True
            ),
        }

    def student_predictions(
        self, change: TrainingChange, seed: int, split: DaySplit | None = None
    ) -> Predictions:
        """Calibrated predictions of a student per surface, read from their file if it exists."""
        split = split or self.split
        config = StudentTrialConfig.model_validate({**change, "seed": seed})
        domain_config = _domain_config(config)
        name = config.model_dump_json()
        if domain_config:
            name += f" domains {domain_config.model_dump_json()}"
        path = self._path(name, split)
        if not path.is_file():
            with self._lake_with_domain_models(domain_config, split) as lake:
                students = list(_surface_predictions(lake, split, config))
                concat_predictions(students).write(path, split)
        return Predictions.read(path, split).sorted_by_impression()

    def gem_predictions(self) -> Predictions:
        """GEM's predictions, calibrated by surface like those of the students."""
        path = self._path("gem, calibrated by earlier GEMs", self.split)
        if not path.is_file():
            with process_group():
                self._predict_gem().write(path, self.split)
        return Predictions.read(path, self.split).sorted_by_impression()

    def worst_calibration(self, predictions: Sequence[Predictions]) -> float:
        """The largest |predictions / true probabilities - 1| of a surface and objective.

        The truth counts the share of outcomes that are logged in time to count as labels. Each is a
        mean over the given predictions (seeds). NaN if the logs have no probabilities.
        """
        errors = []
        for p in predictions:
            truth = true_probabilities(p, self.raw_logs)
            if truth is None:
                return float("nan")
            for code in np.unique(p.surface):
                rows = p.surface == code
                expected = truth.probabilities[rows].sum(0) * self.logged_share
                ratios = p.probabilities[rows].sum(0) / expected
                errors.append(np.abs(ratios - 1))
        by_seed = np.stack(errors).reshape(len(predictions), -1)
        return float(by_seed.mean(0).max())

    def _select_best(self, changes: dict[float, TrainingChange]) -> float:
        """The option with the least NE on the selection days, mean over objectives."""
        ne = {}
        for option, change in changes.items():
            p = self.student_predictions(change, SELECTION_SEED, self.selection_split)
            ne[option] = mean(ne_by_objective(p).values())
        return min(ne, key=lambda option: ne[option])

    @contextmanager
    def _lake_with_domain_models(
        self, config: DomainTrainConfig | None, split: DaySplit
    ) -> Iterator[Lake]:
        """The lake; with a configuration of domains' models, a temporary one that has them."""
        if config is None:
            yield self.lake
            return
        with tempfile.TemporaryDirectory() as folder:
            lake = link_lake_with_gem(self.lake, Path(folder))
            for name in lake.spec.domains:
                train_domain(lake, name, split, config)
            yield lake

    def _predict_gem(self) -> Predictions:
        lake, split = self.lake, self.split
        state, reader = load_train_state(lake, split.train_last)

        days = list(date_range(split.test_first, split.test_last))
        window = LabelWindow.for_test(split, lake.spec)
        batches = reader.batches(days, window, BATCH_ROWS, Shuffle(None))
        late = predict(lambda batch: state.model(batch).logits, batches, self.objectives)
        early = self._teacher_predictions(reader)
        calibrated = []
        for code in np.unique(late.surface):
            calibration = fit_per_objective(early.filter(early.surface == code), {})
            evaluated = SegmentedPredictions(late.filter(late.surface == code), {})
            calibrated.append(evaluated.calibrated(RankerCalibration(calibration)).predictions)
        return concat_predictions(calibrated)

    def _teacher_predictions(self, reader: ExampleReader) -> Predictions:
        """What earlier GEMs predicted of the rows by which rankers are calibrated.

        GEM itself has learned the clicks of rows whose conversions became final later, in two
        passes, which distorts the conversions that it predicts of these rows.
        """
        lake, split = self.lake, self.split
        assert split.calibration is not None
        first = split.calibration - timedelta(days=lake.spec.label_maturity_days)
        days = list(date_range(first, split.calibration))
        teacher = TeacherPredictions.of_gem(lake, days)
        window = LabelWindow.for_calibration(split, lake.spec)
        batches = reader.batches(days, window, BATCH_ROWS, Shuffle(None))
        return predict(
            lambda batch: teacher.lookup(batch.impression_ids).logits, batches, self.objectives
        )

    def _path(self, name: str, split: DaySplit) -> Path:
        tables = (*INPUT_TABLES, "teacher_predictions", "user_teacher_embeddings")
        return trial_path(self.folder, self.lake, tables, split, name)


def complete_teacher_outputs(lake: Lake, days: DayRange) -> None:
    """Write the teacher's outputs of days, unless all of them have some.

    They are written day by day, embeddings last: an interrupted run leaves out the last days.
    """
    if set(date_range(*days)) - lake.rows_by_day("user_teacher_embeddings").keys():
        write_teacher_outputs(lake, days)


def link_lake_with_gem(lake: Lake, folder: Path) -> Lake:
    """A lake of links to another lake, without its models except for GEM."""
    targets = {path.name: path for path in Path(lake.root).iterdir() if path.name != "models"}
    targets["models/gem"] = Path(lake.root, "models", "gem")
    (folder / "models").mkdir(parents=True, exist_ok=True)
    for name, path in targets.items():
        if not (folder / name).exists():
            (folder / name).symlink_to(path.resolve())
    return Lake(str(folder), lake.spec)


def _domain_config(config: StudentTrainConfig) -> DomainTrainConfig | None:
    """How the domains' models that a student needs are trained; None if it needs none."""
    if {config.distillation.warm_start_from, config.distillation.teacher} == {"gem"}:
        return None
    from_gem = config.distillation.model_copy(
        update={"warm_start_from": "gem", "teacher": "gem", "shared_modules": ()}
    )
    return DomainTrainConfig(distillation=from_gem, seed=config.seed)


def _surface_predictions(
    lake: Lake, split: DaySplit, config: StudentTrainConfig
) -> Iterator[Predictions]:
    """Calibrated predictions of the student of each surface."""
    embeddings = load_teacher_embeddings(lake)
    for surface in lake.spec.ad_surfaces:
        trainer = train_on_surfaces(lake, (surface,), split, config, embeddings)
        calibration = fit_calibration(lake, split, trainer, {})
        yield predict_test_days(lake, split, trainer.averaged).calibrated(calibration).predictions
