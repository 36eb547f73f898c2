"""Trainings of GEM in many configurations on the same days, each run once and kept."""

import hashlib
import json
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.harness import commit
from etl.errors import UserError
from etl.spec.base import StrictModel
from etl.spec.effects import model_input_keys
from etl.spec.units import DaySplit
from etl.tables import atomic_io
from etl.tables.lake import Lake
from ranking.report.study import today
from training.baseline import BaselineConfig, train_baseline
from training.config import TrainConfig
from training.data.batch import Shuffle
from training.data.label_window import ALL_LABELS
from training.data.reader import INPUT_TABLES
from training.distributed.process_group import process_group
from training.evaluation.metrics import ne_by_objective
from training.evaluation.predictions import Predictions, concat_predictions
from training.trainer.throughput import measure_cost
from training.trainer.trainer import load_train_state, predict_test, train_days


class TrialRecord(StrictModel):
    """What a training cost, when it was run, and with which code and configuration.

    `flops` are those of an example, forward and backward; `examples` those of all steps;
    `core_seconds` the CPU seconds of training and prediction.
    """

    flops: float
    examples: int
    core_seconds: float
    date: str
    commit: str
    config: dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """Predictions of the test days, and the record of the training."""

    predictions: Predictions
    record: TrialRecord

    @property
    def flops_per_example(self) -> float:
        """FLOPs per example, forward and backward."""
        return self.record.flops

    def ne(self, objective: str) -> float:
        """NE of an objective on the test days, over all surfaces."""
        return ne_by_objective(self.predictions)[objective]


@dataclass(frozen=True)
class TrialRunner:
    """Trainings on the days of a split; `folder` keeps the results of finished ones.

    `trained_at` are the dates and commits of the GEMs whose predictions were read.

    A trial is identified by its configuration, the tables, the keys of the spec that affect what
    models read, and the split: it is run again if one of them changes, but not if the code changes.
    """

    lake: Lake
    split: DaySplit
    folder: Path
    trained_at: set[str] = field(default_factory=set, compare=False)

    def gem(self, config: TrainConfig) -> Trial:
        """GEM with a configuration."""
        path = self._path(config.model_dump_json())
        metadata_path = path.with_suffix(".json")
        if not self.is_finished(config):
            trial = self._run(config)
            trial.predictions.write(path, self.split)
            atomic_io.write_text(metadata_path, trial.record.model_dump_json(indent=1) + "\n")
        record = TrialRecord.model_validate_json(metadata_path.read_text())
        self.trained_at.add(f"{record.date} {record.commit}")
        return Trial(Predictions.read(path, self.split), record)

    def is_finished(self, config: TrainConfig) -> bool:
        """Whether GEM with a configuration has been trained, so that `gem` only reads files."""
        path = self._path(config.model_dump_json())
        return path.is_file() and path.with_suffix(".json").is_file()

    def gem_per_surface(self, config: TrainConfig) -> Predictions:
        """A GEM for each surface that has ads, trained only on its rows."""
        surfaces = self.lake.spec.ad_surfaces
        parts = [self.gem(config.model_copy(update={"surface": s})).predictions for s in surfaces]
        return concat_predictions(parts).sorted_by_impression()

    def gem_all_surfaces(self, config: TrainConfig) -> Predictions:
        """One GEM for all surfaces, with its rows in the order of `gem_per_surface`."""
        return self.gem(config).predictions.sorted_by_impression()

    def lightgbm(self, config: BaselineConfig) -> Predictions:
        """LightGBM on the same features, without histories."""
        path = self._path(f"lightgbm {config.model_dump_json()}")
        if not path.is_file():
            train_baseline(self.lake, self.split, config).write(path, self.split)
        return Predictions.read(path, self.split)

    def _path(self, name: str) -> Path:
        return trial_path(self.folder, self.lake, INPUT_TABLES, self.split, name)

    def _run(self, config: TrainConfig) -> Trial:
        split, start = self.split, time.process_time()
        with scratch_lake(self.lake) as lake, process_group():
            train_days(lake, (split.train_first, split.train_last), config)
            predictions = predict_test(lake, split)
            seconds = time.process_time() - start
            flops, examples = training_cost(lake, split.train_last, config)
        record = TrialRecord(
            flops=flops,
            examples=examples,
            core_seconds=round(seconds, 1),
            date=today(),
            commit=commit(),
            config=config.model_dump(mode="json"),
        )
        return Trial(predictions, record)


def trial_path(folder: Path, lake: Lake, tables: Iterable[str], split: DaySplit, name: str) -> Path:
    """The file of predictions identified by a name, some tables, what models read, and a split."""
    inputs = model_inputs(lake, tables)
    return folder / f"{digest_of([name, inputs, split.model_dump(mode='json')])}.parquet"


def model_inputs(lake: Lake, tables: Iterable[str]) -> list[object]:
    """What models read: id and version of each table, and the keys of the spec that choose of them.

    Versions alone do not tell a table from one that was built again, whose id is another one.
    """
    opened = {name: lake.open(name) for name in tables}
    versions = {name: [str(t.metadata().id), t.version()] for name, t in opened.items()}
    return [versions, model_input_keys(lake.spec.model_dump(mode="json"))]


def digest_of(identity: object) -> str:
    """The name of what has this identity, which JSON can hold."""
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]


@contextmanager
def scratch_lake(lake: Lake) -> Iterator[Lake]:
    """A temporary lake of the same tables, whose models are deleted afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        yield symlinked_lake(lake, Path(folder))


MODEL_OUTPUTS = {
    "_pipeline",
    "models",
    "teacher_predictions",
    "user_teacher_embeddings",
    "evaluations",
    "portfolio",
    "rankers",
    "scores",
    "studies",
}


def symlinked_lake(lake: Lake, folder: Path) -> Lake:
    """A lake of the same tables in another folder, by links, without the outputs of models.

    Raises UserError if the tables are not on this machine.
    """
    if "://" in lake.root:
        raise UserError(f"{lake.root} is not a folder: studies need tables on this machine")
    folder.mkdir(parents=True, exist_ok=True)
    for path in Path(lake.root).iterdir():
        if path.name not in MODEL_OUTPUTS and not (folder / path.name).exists():
            (folder / path.name).symlink_to(path.resolve())
    return Lake(str(folder), lake.spec)


def training_cost(lake: Lake, day: date, config: TrainConfig) -> tuple[float, int]:
    """FLOPs per example, and the examples of all steps, of the GEM that was trained until a day.

    FLOPs are measured on the first batch of the day.
    """
    state, reader = load_train_state(lake, day)
    batches = reader.batches([day], ALL_LABELS, config.batch_rows, Shuffle(0))
    return measure_cost(state, next(iter(batches))).flops_per_example, state.manifest.rows
