"""Models that predict each day before they learn it, each trained once and its predictions kept.

LightGBM is trained again for each day, on all days before it. So is GEM with
`first_training: joint`; else a GEM of one seed goes through the days once: it predicts a day, then
continues to train on it.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, timedelta
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.harness import commit
from benchmarks.studies.trials import scratch_lake, trial_path
from etl.spec.units import DayRange, DaySplit, date_range
from etl.tables import arrow, atomic_io, model_schemas
from etl.tables.lake import Lake
from ranking.report.study import today
from training.baseline import BaselineConfig, TabularDataset, load_tabular, train_baseline
from training.config import TrainConfig
from training.data.label_window import LabelWindow
from training.data.reader import INPUT_TABLES, ExampleReader
from training.distributed.process_group import process_group
from training.evaluation.predictions import Predictions, concat_predictions
from training.teacher.blend import logits_of
from training.trainer.trainer import predict_test, train_days

DayPredictions = dict[date, Predictions]

LEAVES, RATES, COLUMN_FRACTIONS = (31, 63), (0.03, 0.05), (0.3, 0.7)
MAX_TREES, EARLY_STOPPING_ROUNDS = 1500, 50


@dataclass(frozen=True)
class PrequentialTrials:
    """Predictions of the days from `predicted_first` to `last`, by models of all earlier days.

    `trained_at` are the dates and commits of the trainings whose predictions were read.

    A trial is identified by its configuration, the tables, the keys of the spec that affect what
    models read, and the days: it is run again if one of them changes, but not if the code changes.
    """

    lake: Lake
    first: date
    predicted_first: date
    last: date
    folder: Path
    trained_at: set[str] = field(default_factory=set, compare=False)

    def gem(self, config: TrainConfig, teacher: DayPredictions | None = None) -> DayPredictions:
        """Predictions of a GEM with a configuration, by day.

        With `first_training: joint` each day has a new GEM, trained on all earlier days together.
        With `distillation_weight` it also learns what `teacher` predicted of earlier days.
        """
        name = config.model_dump_json() + (
            "" if teacher is None else f" teacher {_digest(teacher)}"
        )
        days = date_range(self.predicted_first, self.last)
        paths = {day: self._path(name, day) for day in days}
        if not all(path.is_file() for path in paths.values()):
            with process_group():
                self._train_gem(config, teacher, paths)
        return {day: self._read(path, day) for day, path in paths.items()}

    def _train_gem(
        self, config: TrainConfig, teacher: DayPredictions | None, paths: Mapping[date, Path]
    ) -> None:
        """Write the predictions of each day; a joint training starts over for each of them."""
        is_joint = config.first_training == "joint"
        for days in [[day] for day in paths] if is_joint else [list(paths)]:
            with scratch_lake(self.lake) as lake:
                trained_from = self.first
                for day in days:
                    split = self.split(day)
                    if teacher is not None:
                        write_teacher_predictions(lake, teacher, (trained_from, split.train_last))
                    if not (is_joint and paths[day].is_file()):
                        train_days(lake, (trained_from, split.train_last), config)
                        self._keep(predict_test(lake, split), paths[day], split)
                    trained_from = day

    def lightgbm(self, configs: Mapping[str, BaselineConfig]) -> DayPredictions:
        """Predictions of LightGBM with a configuration by objective, by day."""
        name = json.dumps({name: config.model_dump() for name, config in configs.items()})
        predictions = {}
        for day in date_range(self.predicted_first, self.last):
            path, split = self._path(f"lightgbm {name}", day), self.split(day)
            if not path.is_file():
                self._keep(train_baseline(self.lake, split, configs), path, split)
            predictions[day] = self._read(path, day)
        return predictions

    def tuned_lightgbm(self, day: date) -> dict[str, BaselineConfig]:
        """The best configuration of LightGBM for each objective on a day, kept in a file."""
        tried = json.dumps([config.model_dump() for config in grid()])
        name = f"tuned lightgbm {EARLY_STOPPING_ROUNDS} {tried}"
        path = self._path(name, day).with_suffix(".json")
        if not path.is_file():
            configs = tune_lightgbm(self.lake, self.split(day))
            dumped = {name: config.model_dump() for name, config in configs.items()}
            atomic_io.write_text(path, json.dumps(dumped))
        chosen = json.loads(path.read_text())
        return {name: BaselineConfig.model_validate(chosen[name]) for name in chosen}

    def split(self, day: date) -> DaySplit:
        """Train on all days before a day, and test on it."""
        return DaySplit(
            train_first=self.first,
            train_last=day - timedelta(days=1),
            calibration=None,
            test_first=day,
            test_last=day,
            data_until=day,
        )

    def _path(self, name: str, day: date) -> Path:
        return trial_path(self.folder, self.lake, INPUT_TABLES, self.split(day), name)

    def _keep(self, predictions: Predictions, path: Path, split: DaySplit) -> None:
        atomic_io.write_text(path.with_suffix(".measured"), json.dumps(f"{today()} {commit()}"))
        predictions.write(path, split)

    def _read(self, path: Path, day: date) -> Predictions:
        self.trained_at.add(json.loads(path.with_suffix(".measured").read_text()))
        return Predictions.read(path, self.split(day)).sorted_by_impression()


def write_teacher_predictions(lake: Lake, teacher: DayPredictions, days: DayRange) -> None:
    """Store what a teacher predicted of a range of days, for GEMs that learn from it.

    Each day was predicted by models of the days before it.
    """
    schema = model_schemas.teacher_predictions(lake.spec)
    for day in date_range(*days):
        if day not in teacher:
            continue
        predictions = teacher[day]
        logits = logits_of(predictions.probabilities).astype(np.float32)
        columns = {
            "impression_id": pa.array(predictions.impression_ids, pa.string()),
            "fm_version": pa.repeat("teacher of the study", len(logits)),
            "fm_trained_until": pa.repeat(pa.scalar(day - timedelta(days=1)), len(logits)),
            "day": pa.repeat(pa.scalar(day), len(logits)),
            "bucket": pa.repeat(pa.scalar(0, pa.int32()), len(logits)),  # GEM reads complete days
        }
        columns |= {
            f"logit_{objective}": pa.array(np.ascontiguousarray(column))
            for objective, column in zip(predictions.objectives, logits.T, strict=True)
        }
        arrow.replace_rows(lake, schema, pa.table(columns), f"day = '{day}'", {})


def _digest(predictions: DayPredictions) -> str:
    """A hash of the predictions of some days."""
    digest = hashlib.sha256()
    for day in sorted(predictions):
        digest.update(f"{day}".encode() + predictions[day].probabilities.tobytes())
    return digest.hexdigest()[:16]


def pooled(by_day: DayPredictions, first: date, last: date = date.max) -> Predictions:
    """The predictions of a range of days as one."""
    return concat_predictions([by_day[day] for day in sorted(by_day) if first <= day <= last])


def grid() -> list[BaselineConfig]:
    """The configurations of LightGBM that are tried."""
    return [
        BaselineConfig(
            num_boost_round=MAX_TREES,
            num_leaves=leaves,
            learning_rate=rate,
            feature_fraction=fraction,
            validation_fraction=0,
        )
        for leaves, rate, fraction in product(LEAVES, RATES, COLUMN_FRACTIONS)
    ]


def tune_lightgbm(lake: Lake, split: DaySplit) -> dict[str, BaselineConfig]:
    """For each objective the configuration of the grid with the best AUC on the test day.

    The number of trees is that with the least logloss there.
    """
    reader = ExampleReader.latest(lake, max_length=0)
    training_days = list(date_range(split.train_first, split.train_last))
    train = load_tabular(reader, training_days, LabelWindow.for_training(split, lake.spec))
    valid = load_tabular(reader, [split.test_last], LabelWindow.for_test(split, lake.spec))
    return {
        name: _best_config(train, valid, column) for column, name in enumerate(lake.spec.objectives)
    }


def _best_config(train: TabularDataset, valid: TabularDataset, column: int) -> BaselineConfig:
    import lightgbm

    x, y = _labeled_rows(train, column)
    valid_x, valid_y = _labeled_rows(valid, column)
    best: tuple[float, BaselineConfig] | None = None
    for config in grid():
        training = lightgbm.Dataset(x, y)
        booster = lightgbm.train(
            config.params | {"metric": ["binary_logloss", "auc"]},
            training,
            config.num_boost_round,
            [lightgbm.Dataset(valid_x, valid_y, reference=training)],
            callbacks=[
                lightgbm.early_stopping(
                    EARLY_STOPPING_ROUNDS, first_metric_only=True, verbose=False
                )
            ],
        )
        auc = booster.best_score["valid_0"]["auc"]
        if best is None or auc > best[0]:
            best = auc, config.model_copy(update={"num_boost_round": booster.best_iteration})
    assert best is not None
    return best[1]


def _labeled_rows(dataset: TabularDataset, column: int) -> tuple[np.ndarray, np.ndarray]:
    mask = dataset.label_mask[:, column]
    return dataset.features[mask], dataset.labels[mask, column]
