"""Groups of pairs of surface and objective, each with a model of its own; trained once and kept.

B examples, O objectives, S surfaces (with code 0 for none).
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from etl.spec.effects import model_input_keys
from etl.spec.model import DataSpec
from etl.spec.units import DaySplit
from etl.tables.lake import Lake
from etl.tables.uri import StoragePath, resolve_uri
from features.schema import FeatureSchema
from ranking.scoring.offsets import RankerCalibration
from ranking.scoring.predictions import SegmentedPredictions
from ranking.student.config import StudentTrainConfig
from ranking.student.trained import TrainedStudent
from ranking.trainer.calibrate import fit_per_objective
from ranking.trainer.student_trainer import StudentTrainer
from ranking.trainer.train import init_student
from training.data.batch import Batch, Shuffle
from training.data.label_window import LabelWindow
from training.data.reader import INPUT_TABLES
from training.evaluation.feature_units import FeatureUnit, without_units
from training.evaluation.predictions import Predictions, concat_predictions, predict
from training.teacher.embeddings import TeacherEmbeddings

PREDICT_ROWS = 2048


class Pair(NamedTuple):
    """An objective on a surface."""

    surface: str
    objective: str

    def __str__(self) -> str:
        """The pair for tables and messages."""
        return f"{self.objective} on {self.surface}"


Group = frozenset[Pair]


def pairs_of(spec: DataSpec) -> list[Pair]:
    """All pairs of a spec: the objectives of each surface that has ads."""
    return [
        Pair(surface, objective)
        for surface in spec.ad_surfaces
        for objective in spec.objectives
        if surface in spec.surfaces_of(objective)
    ]


def surfaces_of(group: Group) -> tuple[str, ...]:
    """The surfaces of a group's pairs, in the order of their names."""
    return tuple(sorted({pair.surface for pair in group}))


def format_group(group: Group) -> str:
    """The pairs of a group by surface: `feed (click, long_view), reels (click)`."""
    parts = []
    for surface in surfaces_of(group):
        objectives = sorted(pair.objective for pair in group if pair.surface == surface)
        parts.append(f"{surface} ({', '.join(objectives)})")
    return ", ".join(parts)


def per_surface(pairs: Iterable[Pair]) -> list[Group]:
    """A group for each surface: how rankers are trained by default."""
    by_surface: dict[str, set[Pair]] = {}
    for pair in pairs:
        by_surface.setdefault(pair.surface, set()).add(pair)
    return [frozenset(group) for group in by_surface.values()]


@dataclass(frozen=True)
class GroupDesign:
    """A group, and the model that serves it: its sizes, and the units of features it lacks."""

    group: Group
    config: StudentTrainConfig
    dropped: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """A hash of the design."""
        pairs = ",".join(f"{p.surface}/{p.objective}" for p in sorted(self.group))
        text = f"{pairs} {self.config.model_dump_json()} {','.join(sorted(self.dropped))}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class GroupTrainer(StudentTrainer):
    """Trains a student on the labels of a group's pairs only, from labels alone."""

    def __init__(
        self, student: TrainedStudent, design: GroupDesign, units: Mapping[str, FeatureUnit]
    ) -> None:
        super().__init__(student, design.config.labels_only(), None)
        reader = student.input_builder.reader
        self._pair_mask = pair_mask(design.group, reader.lake.spec, reader.features)
        self.dropped = [units[name] for name in design.dropped]

    @override
    def _step(self, batch: Batch) -> None:
        mask = batch.label_mask & self._pair_mask[batch.surface]
        batch = replace(batch, label_mask=mask)
        super()._step(without_units(batch, self.dropped))

    def logits(self, batch: Batch) -> Tensor:
        """Logits (B, O) of the averaged student, which reads no dropped unit."""
        return self.averaged.logits(without_units(batch, self.dropped))


def pair_mask(group: Group, spec: DataSpec, features: FeatureSchema) -> Tensor:
    """Whether a group has the pair of each surface, by its code, and objective (S, O)."""
    mask = torch.zeros(1 + len(spec.surface_codes), len(features.objectives), dtype=torch.bool)
    for pair in group:
        mask[spec.surface_codes[pair.surface], features.objectives.index(pair.objective)] = True
    return mask


@dataclass(frozen=True)
class Portfolio:
    """Groups with their designs, which together have each pair once.

    `first_designs` are those that the search for the portfolio began with; empty for these.
    """

    designs: tuple[GroupDesign, ...]
    first_designs: tuple[GroupDesign, ...] = ()

    def of(self, pair: Pair) -> GroupDesign:
        """The design that serves a pair."""
        return next(design for design in self.designs if pair in design.group)

    def replaced(self, merged: Collection[Group], design: GroupDesign) -> "Portfolio":
        """The portfolio with one design instead of those of some groups."""
        kept = tuple(d for d in self.designs if d.group not in merged)
        return self.with_designs((*kept, design))

    def with_designs(self, designs: tuple[GroupDesign, ...]) -> "Portfolio":
        """A portfolio of other designs, from the same search."""
        return Portfolio(designs, self.first_designs or self.designs)


@dataclass(frozen=True)
class GroupTrials:
    """Trainings of groups on the days of a split; their predictions are kept in the lake.

    Decisions are made on validation rows: labels that became final on the calibration day, of which
    no model has learned any. The test days are predicted only for the report.
    """

    lake: Lake
    split: DaySplit
    units: Mapping[str, FeatureUnit]

    def validation(self, design: GroupDesign) -> Predictions:
        """Predictions of the validation rows of a group's surfaces, sorted by impression."""
        return self._predictions(design, "validation")

    def test(self, design: GroupDesign) -> Predictions:
        """Predictions of the test rows, calibrated by surface on the validation rows."""
        return self._predictions(design, "test")

    def labels(self, design: GroupDesign, rows: str) -> Predictions:
        """The labels of the `validation` or `test` rows of a group's surfaces; nothing is trained.

        All probabilities are 1/2.
        """
        trainer = self.untrained(design)
        objectives = trainer.student.input_builder.reader.features.objectives
        return labels_of(self.batches_of(trainer, rows), objectives)

    def untrained(self, design: GroupDesign) -> GroupTrainer:
        """The trainer of a group, with initial weights."""
        surfaces, config = surfaces_of(design.group), design.config.labels_only()
        none = TeacherEmbeddings.empty()
        student = init_student(self.lake, surfaces, self.split, config, none)
        return GroupTrainer(student, design, self.units)

    def train(self, design: GroupDesign) -> GroupTrainer:
        """A trained group."""
        split, trainer = self.split, self.untrained(design)
        days = trainer.student.input_builder.reader.days()
        trained = [day for day in days if split.train_first <= day <= split.train_last]
        trainer.train(trained, LabelWindow.for_training(split, self.lake.spec))
        return trainer

    def windows(self) -> dict[str, LabelWindow]:
        """The labels of the validation and of the test rows."""
        return {
            "validation": LabelWindow.for_calibration(self.split, self.lake.spec),
            "test": LabelWindow.for_test(self.split, self.lake.spec),
        }

    def batches_of(self, trainer: GroupTrainer, rows: str) -> Iterable[Batch]:
        """The batches of the validation or of the test rows of a group's surfaces."""
        reader, split = trainer.student.input_builder.reader, self.split
        assert split.calibration is not None
        last = split.calibration if rows == "validation" else split.test_last
        first = split.train_first if rows == "validation" else split.test_first
        days = [day for day in reader.days() if first <= day <= last]
        return reader.batches(days, self.windows()[rows], PREDICT_ROWS, Shuffle(None))

    def _predictions(self, design: GroupDesign, rows: str) -> Predictions:
        path = self.predictions_path(design, rows)
        if not path.is_file():
            trainer = self.train(design)
            objectives = trainer.student.input_builder.reader.features.objectives
            predicted = {
                name: predict(trainer.logits, self.batches_of(trainer, name), objectives)
                for name in ("validation", "test")
            }
            for name, found in _calibrated(predicted).items():
                found.sorted_by_impression().write(self.predictions_path(design, name), self.split)
        return Predictions.read(path, self.split)

    def predictions_path(self, design: GroupDesign, rows: str) -> StoragePath:
        """Where the predictions of `validation` or `test` rows are kept."""
        versions = {name: self.lake.version(name) for name in INPUT_TABLES}
        inputs = model_input_keys(self.lake.spec.model_dump(mode="json"))
        identity = f"{design.key} {sorted(versions.items())} {self.split.model_dump_json()} "
        identity += json.dumps(inputs)
        name = hashlib.sha256(identity.encode()).hexdigest()[:16]
        return resolve_uri(self.lake.root, "portfolio", f"{name}-{rows}.parquet")


def labels_of(batches: Iterable[Batch], objectives: Sequence[str]) -> Predictions:
    """The labels of batches, with probabilities of 1/2."""
    return predict(lambda batch: torch.zeros_like(batch.labels), batches, objectives)


def _calibrated(predicted: Mapping[str, Predictions]) -> dict[str, Predictions]:
    """Both predictions, with Platt scaling by surface and objective, fitted on validation rows.

    Those of a surface without validation rows are not scaled.
    """
    validation = predicted["validation"]
    parts = {
        name: [found.filter(np.zeros_like(found.surface, bool))]
        for name, found in predicted.items()
    }
    for code in np.unique(np.concatenate([found.surface for found in predicted.values()])):
        fitted = fit_per_objective(validation.filter(validation.surface == code), {})
        for name, found in predicted.items():
            rows = SegmentedPredictions(found.filter(found.surface == code), {})
            parts[name].append(rows.calibrated(RankerCalibration(fitted)).predictions)
    return {name: concat_predictions(found) for name, found in parts.items()}


def flops_per_example(trainer: GroupTrainer, batch: Batch) -> float:
    """FLOPs to score an example of a batch, forward; the user's side is computed per request.

    Without those of the first layer for units of features that are dropped.
    """
    student = trainer.averaged
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        student.logits(batch)
    config = student.student.config
    dropped = sum(unit.input_width(config.embedding_dim) for unit in trainer.dropped)
    return float(counter.get_total_flops()) / len(batch) - 2.0 * dropped * config.hidden[0]
