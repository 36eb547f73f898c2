"""Predictions of rankers that are refit each day, as they would have served the next day.

A ranker of a surface learns the first days, is calibrated on the day after, and is then refit day
by day. Each day has two sets of rows: those whose labels become final on it, which refresh the
offsets before they are learned, and the impressions that are served on it. Both are predicted with
the weights of the day before. Rankers learn from labels only, so that no GEM is trained.

n rows, O objectives.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from benchmarks.studies.trials import trial_path
from etl.array_types import Float32, Float64, Int64
from etl.spec.model import DataSpec
from etl.spec.units import MICROS, DaySplit, date_range
from etl.tables import atomic_io, schemas
from etl.tables.arrow import snapshot
from etl.tables.lake import Lake
from ranking.scoring.calibration import logit
from ranking.scoring.offsets import RankerCalibration
from ranking.scoring.predictions import (
    BatchScores,
    SegmentedPredictions,
    concat_by_segment,
    predict_by_segment,
)
from ranking.scoring.scorer import SCORE_ROWS
from ranking.student.config import StudentTrainConfig
from ranking.student.trained import TrainedStudent
from ranking.trainer.calibrate import fit_calibration
from ranking.trainer.continuation import continue_training, day_windows
from ranking.trainer.label_days import days_with_labels
from ranking.trainer.train import train_on_surfaces
from training.data.batch import Batch, Shuffle
from training.data.label_window import LabelWindow
from training.data.reader import INPUT_TABLES, ExampleReader
from training.evaluation.predictions import Predictions

FIELDS = ("impression_ids", "user_hashes", "surface", "probabilities", "labels", "label_mask")


@dataclass(frozen=True)
class ServedRows:
    """Predictions (n), at logged positions if not stated, calibrated without offsets.

    `as_of` (n) are the epoch seconds of the requests, `served` (n, O) the probabilities at the
    served position, `positions` (n) the logged ones, NaN where they are unknown.
    """

    predictions: SegmentedPredictions
    as_of: Int64
    positions: Float32
    served: Float64

    def take(self, rows: Int64) -> "ServedRows":
        """Some of the rows."""
        predictions = self.predictions.predictions
        segments = {name: values[rows] for name, values in self.predictions.segments.items()}
        chosen = replace(predictions, **{name: getattr(predictions, name)[rows] for name in FIELDS})
        return ServedRows(
            SegmentedPredictions(chosen, segments),
            self.as_of[rows],
            self.positions[rows],
            self.served[rows],
        )

    def at_served_position(self) -> "ServedRows":
        """The rows with their probabilities at the served position."""
        chosen = replace(self.predictions.predictions, probabilities=self.served)
        return replace(self, predictions=SegmentedPredictions(chosen, self.predictions.segments))

    def write(self, path: Path) -> None:
        """Write one file, atomically."""
        predictions = self.predictions.predictions
        arrays = {name: getattr(predictions, name) for name in FIELDS}
        arrays["impression_ids"] = arrays["impression_ids"].astype(str)
        arrays |= {f"segment_{name}": v for name, v in self.predictions.segments.items()}
        arrays |= {"as_of": self.as_of, "positions": self.positions, "served": self.served}
        arrays["objectives"] = np.array(predictions.objectives)
        with atomic_io.replace_file(path) as temporary, Path(temporary).open("wb") as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def read(cls, path: Path) -> "ServedRows":
        """Read a file that `write` wrote."""
        with np.load(path, allow_pickle=False) as stored:
            arrays = dict(stored)
        arrays["impression_ids"] = arrays["impression_ids"].astype(object)
        objectives = tuple(arrays["objectives"].tolist())
        segments = {
            name.removeprefix("segment_"): values
            for name, values in arrays.items()
            if name.startswith("segment_")
        }
        predictions = Predictions(objectives, *(arrays[name] for name in FIELDS))
        return cls(
            SegmentedPredictions(predictions, segments),
            arrays["as_of"],
            arrays["positions"],
            arrays["served"],
        )


@dataclass(frozen=True)
class ServingLog:
    """What a ranker predicted while it was refit each day.

    `final` are the rows whose labels became final on the days, `served` those that were served.
    `mature_at` are the epoch seconds at which the labels of `final` are final, by objective.
    """

    spec: DataSpec
    days: list[date]
    final: ServedRows
    served: ServedRows
    mature_at: Mapping[str, Int64]


@dataclass(frozen=True)
class RefitPredictions:
    """Rankers of some days, each trained once per surface and seed, and their rows kept.

    Training until `train_last`, Platt scaling on the day after; rows of the days after that one
    until `last`.
    """

    lake: Lake
    surfaces: tuple[str, ...]
    first: date
    train_last: date
    last: date
    folder: Path

    @property
    def days(self) -> list[date]:
        """The days on which rankers serve."""
        return list(date_range(self.train_last + timedelta(days=2), self.last))

    def log(self, surface: str, seed: int) -> ServingLog:
        """The rows of the ranker of a surface."""
        paths = [self._path(f"{kind} {surface} {seed}") for kind in ("final", "served")]
        if not all(path.is_file() for path in paths):
            final, served = self._train(surface, seed)
            final.write(paths[0])
            served.write(paths[1])
        final, served = (ServedRows.read(path) for path in paths)
        mature_at = maturity_times(self.lake, final.predictions.predictions.impression_ids)
        return ServingLog(self.lake.spec, self.days, final, served, mature_at)

    def _path(self, name: str) -> Path:
        config = json.dumps([labels_only(0).model_dump(mode="json"), str(self.train_last)])
        path = trial_path(
            self.folder, self.lake, INPUT_TABLES, self._split(), f"refits {name} {config}"
        )
        return path.with_suffix(".npz")

    def _split(self) -> DaySplit:
        return DaySplit(
            train_first=self.first,
            train_last=self.train_last,
            calibration=self.train_last + timedelta(days=1),
            test_first=self.days[0],
            test_last=self.last,
            data_until=self.last,
        )

    def _train(self, surface: str, seed: int) -> tuple[ServedRows, ServedRows]:
        spec, split = self.lake.spec, self._split()
        trainer = train_on_surfaces(self.lake, (surface,), split, labels_only(seed))
        calibration = replace(fit_calibration(self.lake, split, trainer, {}), offsets=None)
        snapshot = trainer.snapshot(self.first, spec.day_end(self.train_last))
        reader = ExampleReader.latest(
            self.lake, None, snapshot.record.config.model.max_length, (surface,)
        )
        final, served = [], []
        all_labels = LabelWindow(0, spec.day_end(self.last))
        for window, day in day_windows(self.lake, snapshot.record.labels_until, all_labels.end):
            days = [d for d in days_with_labels(reader, window) if d >= self.first]
            trainer = continue_training(reader, snapshot, days, day)
            if day in self.days:
                student = trainer.averaged
                unlearned = replace(window, only_unlearned=True)
                final.append(predict_rows(student, days, unlearned, calibration))
                served.append(predict_rows(student, [day], all_labels, calibration))
            trainer.train(days, window)
            snapshot = trainer.snapshot(self.first, window.end)
        return concat_rows(final), concat_rows(served)


def maturity_times(lake: Lake, impression_ids: npt.NDArray[np.object_]) -> dict[str, Int64]:
    """Epoch seconds (n) at which the labels of impressions are final, by objective, as stored.

    A label of an impression that is logged late is not final before the impression is visible.
    """
    columns = {name: f"label_mature_ts_{name}" for name in lake.spec.objectives}
    impressions = snapshot(lake, schemas.table_schema(lake.spec, "impressions"))
    table = impressions.read(["impression_id", *columns.values()])
    ids = pa.array(impression_ids, pa.string())
    rows = table.take(pc.index_in(ids, table["impression_id"].combine_chunks()))
    return {name: rows[column].to_numpy() // MICROS["s"] for name, column in columns.items()}


def labels_only(seed: int) -> StudentTrainConfig:
    """Students that learn from labels only."""
    return StudentTrainConfig(seed=seed).labels_only()


def predict_rows(
    student: TrainedStudent, days: list[date], window: LabelWindow, calibration: RankerCalibration
) -> ServedRows:
    """A student's predictions for the labels of a window, with Platt scaling."""
    reader = student.input_builder.reader
    as_of: list[Int64] = [np.zeros(0, np.int64)]
    positions: list[Float32] = [np.zeros(0, np.float32)]
    effects: list[Float64] = [np.zeros((0, len(reader.lake.spec.objectives)))]
    feature = reader.features.position
    column = reader.features.numeric_columns.index(feature.column) if feature else None

    def score(batch: Batch) -> BatchScores:
        added = student.position_effects(batch)
        as_of.append(batch.as_of[batch.request_index].numpy())
        unknown = np.full(len(batch), np.nan, np.float32)
        positions.append(unknown if column is None else batch.row_numeric[:, column].numpy())
        effects.append(added.expand(len(batch), -1).double().numpy())
        return BatchScores(student.logits(batch))

    with torch.no_grad():
        batches = reader.batches(days, window, SCORE_ROWS, Shuffle(None))
        predicted = predict_by_segment(score, batches, reader.lake.spec, student.num_items)
    at_served = logit(predicted.predictions.probabilities) - np.concatenate(effects)
    return ServedRows(
        predicted.calibrated(calibration),
        np.concatenate(as_of),
        np.concatenate(positions),
        calibration(at_served, predicted.segments, predicted.predictions.objectives),
    )


def concat_rows(parts: list[ServedRows]) -> ServedRows:
    """The rows of several predictions, in order."""
    return ServedRows(
        concat_by_segment([part.predictions for part in parts]),
        np.concatenate([part.as_of for part in parts]),
        np.concatenate([part.positions for part in parts]),
        np.concatenate([part.served for part in parts]),
    )
