"""Permutation importance: how much worse GEM predicts the test days without a unit of features.

The values of a unit, an attribute or all counters of a key, are given to other impressions of the
same batch. Units of which one is nearly a function of another are permuted together, because
permuting one of them would show little.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import date

import torch
from pydantic import BaseModel
from torch import Tensor
from tqdm import tqdm

from etl.spec.model import DataSpec
from etl.tables import atomic_io
from etl.tables.uri import StoragePath, resolve_uri
from training.data.batch import Batch
from training.evaluation.feature_units import UnitPermutation, all_units, correlated_units
from training.evaluation.predictions import (
    ConfidenceInterval,
    has_enough_labels,
    paired_ne_difference,
    predict,
)

MIN_LABELS = 30


class UnitImportance(BaseModel, frozen=True):
    """How much NE of an objective rises without a unit, or several that go together, [95 %].

    The interval is that of users.
    """

    units: tuple[str, ...]
    objective: str
    increase: float
    low: float
    high: float

    @property
    def name(self) -> str:
        """The names of the units."""
        return " and ".join(self.units)

    def __str__(self) -> str:
        """In units of 1e-4, as differences of NE are small."""
        return f"{self.name} {ConfidenceInterval(self.increase, self.low, self.high)}"


class ImportanceStudy(BaseModel, frozen=True):
    """The importances of all units for a GEM, by objective and the most important first."""

    gem_day: date
    num_rows: int
    importances: list[UnitImportance]

    def save(self, lake: str) -> None:
        """Write the study to the lake, where the report finds it."""
        atomic_io.write_text(_study_path(lake), self.model_dump_json(indent=1))

    @classmethod
    def load(cls, lake: str) -> "ImportanceStudy | None":
        """The lake's latest study; None if there is none."""
        path = _study_path(lake)
        return cls.model_validate_json(path.read_text()) if path.exists() else None


def _study_path(lake: str) -> StoragePath:
    return resolve_uri(lake, "evaluations", "importance.json")


def measure_importances(
    spec: DataSpec, logits: Callable[[Batch], Tensor], batches: Sequence[Batch], gem_day: date
) -> ImportanceStudy:
    """The importances for a GEM's logits (B, O), on batches with final labels.

    Objectives with fewer than MIN_LABELS positive or negative labels are left out.
    """
    units, objectives = all_units(spec), list(spec.objectives)
    groups = correlated_units(units, torch.cat([batch.row_numeric for batch in batches]))
    base = predict(logits, batches, objectives)
    objectives = [name for name in objectives if has_enough_labels(base, name, MIN_LABELS)]
    importances = []
    for names in tqdm(groups, desc="importance", unit="unit", disable=None):
        permute = UnitPermutation([units[name] for name in names])
        permuted = predict(logits, map(permute, batches), base.objectives)
        for objective in objectives:
            difference = paired_ne_difference([permuted], [base], objective)
            importance = UnitImportance(
                units=names,
                objective=objective,
                increase=difference.value,
                low=difference.low,
                high=difference.high,
            )
            importances.append(importance)
    importances.sort(key=lambda i: (objectives.index(i.objective), -i.increase))
    num_rows = len(base.impression_ids)
    return ImportanceStudy(gem_day=gem_day, num_rows=num_rows, importances=importances)


def take_rows(batches: Iterable[Batch], max_rows: int) -> list[Batch]:
    """The first batches, until they have `max_rows` rows."""
    selected, num_rows = [], 0
    for batch in batches:
        selected.append(batch)
        num_rows += len(batch)
        if num_rows >= max_rows:
            break
    return selected
