"""Permutation importances: a model that reads one unit of features."""

from dataclasses import replace
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

from etl.tables.lake import Lake
from training.data.batch import Batch, Shuffle
from training.data.label_window import LabelWindow
from training.data.reader import ExampleReader
from training.evaluation.feature_units import all_units
from training.evaluation.importance import ImportanceStudy, measure_importances, take_rows

DAY = date(2026, 1, 1)
UNIT = "counters by user, category"


def test_only_units_that_a_model_reads_matter(lake: Lake) -> None:
    """Labels of the first objective are what the model predicts; others have none."""
    column = all_units(lake.spec)[UNIT].row_numeric[0]
    reader = ExampleReader.latest(lake)
    window = LabelWindow(0, lake.spec.day_end(reader.days()[-1]))

    def logits(batch: Batch) -> Tensor:
        known = torch.nan_to_num(batch.row_numeric[:, column])
        return 4 * (known[:, None] - 1).expand(batch.labels.shape)

    batches = take_rows(reader.batches(reader.days(), window, 256, Shuffle(0)), 1500)
    assert 1500 <= sum(map(len, batches)) < 1500 + 2 * 256
    first = torch.arange(batches[0].labels.shape[1]) == 0
    learned = [
        replace(b, labels=(logits(b) > 0).float(), label_mask=b.label_mask | first) for b in batches
    ]
    learned = [replace(b, label_mask=first.expand(b.label_mask.shape)) for b in learned]
    study = measure_importances(lake.spec, logits, learned, DAY)
    assert {found.objective for found in study.importances} == {next(iter(lake.spec.objectives))}
    matter = [found for found in study.importances if found.increase != 0]
    assert len(matter) == 1 and UNIT in matter[0].units and matter[0].low > 0
    assert study.importances[0] == matter[0]
    units = [name for found in study.importances for name in found.units]
    assert sorted(units) == sorted(all_units(lake.spec))


def test_a_lake_keeps_its_latest_study(tmp_path: Path) -> None:
    assert ImportanceStudy.load(str(tmp_path)) is None
    study = ImportanceStudy(gem_day=DAY, num_rows=9, importances=[])
    study.save(str(tmp_path))
    assert ImportanceStudy.load(str(tmp_path)) == study
