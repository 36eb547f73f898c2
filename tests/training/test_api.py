"""The Python API: batches for a DataLoader, and predictions of the trained GEM."""

import subprocess
import sys
from collections import Counter
from datetime import date, timedelta
from pathlib import Path

import pyarrow.compute as pc
import pytest
import torch
from deltalake import DeltaTable
from torch.utils.data import DataLoader

import training
from etl.errors import UserError
from etl.spec.units import MICROS
from etl.tables import arrow, label_schemas, model_schemas
from etl.tables.lake import Lake
from tests.conftest import FIRST, LAST, ROOT
from training.data.batch import Batch, Shuffle, batch_digest
from training.data.label_window import ALL_LABELS, LabelWindow
from training.data.reader import ExampleReader

DAYS = (str(FIRST), str(LAST))


def impressions_of(batches: list[Batch]) -> list[str]:
    return [impression for batch in batches for impression in batch.impression_ids]


def test_importing_training_imports_no_torch() -> None:
    code = "import sys, training; assert 'torch' not in sys.modules; training.ExampleDataset"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_package_has_no_other_attributes() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Missing'"):
        _ = training.Missing


def test_a_dataset_yields_batches_of_final_labels(lake: Lake, spec_path: Path) -> None:
    dataset = training.ExampleDataset(lake.root, spec_path, DAYS, batch_rows=100)
    batches = list(dataset)
    assert len(batches) > 2
    assert all(batch.label_mask.any(1).all() for batch in batches)
    impressions = impressions_of(batches)
    assert len(impressions) == len(set(impressions))
    again = [batch_digest(batch) for batch in dataset]
    assert again == [batch_digest(batch) for batch in batches]


def test_a_dataset_may_hold_unlabelled_impressions_and_those_of_one_surface(lake: Lake) -> None:
    surface = lake.spec.ad_surfaces[0]
    every = training.ExampleDataset(lake.root, lake.spec, DAYS, label_window=ALL_LABELS)
    of_surface = training.ExampleDataset(
        lake.root, lake.spec, DAYS, surfaces=(surface,), max_length=0, label_window=ALL_LABELS
    )
    assert len(impressions_of(list(every))) == lake.count_rows("examples", (FIRST, LAST))
    batches = list(of_surface)
    assert batches
    assert all((batch.surface == lake.spec.surface_codes[surface]).all() for batch in batches)
    assert not any(len(batch.history.item_index) for batch in batches)


def test_a_surface_that_the_spec_does_not_have_is_refused(lake: Lake) -> None:
    with pytest.raises(UserError, match="no ads on surface 'moon'"):
        training.ExampleDataset(lake.root, lake.spec, DAYS, surfaces=("moon",), max_length=0)


def test_a_reader_of_no_history_needs_no_name_of_a_sequence(lake: Lake) -> None:
    sequences = dict.fromkeys(("behaviour", "clicks"), lake.spec.sequences["behaviour"])
    two = Lake(lake.root, lake.spec.model_copy(update={"sequences": sequences}))
    reader = ExampleReader.latest(two, max_length=0)
    batch = next(iter(reader.batches([FIRST], ALL_LABELS, 64, Shuffle(None))))
    assert not len(batch.history.item_index)
    with pytest.raises(UserError, match="--sequence is missing"):
        ExampleReader.latest(two)


def test_a_label_window_selects_labels(lake: Lake) -> None:
    window = LabelWindow(0, lake.spec.day_end(FIRST))
    early = training.ExampleDataset(lake.root, lake.spec, (FIRST, LAST), label_window=window)
    late = training.ExampleDataset(lake.root, lake.spec, (FIRST, LAST))
    labels = [sum(int(batch.label_mask.sum()) for batch in dataset) for dataset in (early, late)]
    assert 0 < labels[0] < labels[1]


def label_until(lake: Lake, data_until: int) -> None:
    """Make labels null that are not final at an epoch second, as `--data-until` does."""
    schema = label_schemas.impressions(lake.spec)
    table = arrow.snapshot(lake, schema).read()
    for name in lake.spec.objectives:
        is_final = pc.less(table[f"label_mature_ts_{name}"], data_until * MICROS["s"])
        label = pc.if_else(is_final, table[f"label_{name}"], None)
        table = table.set_column(table.column_names.index(f"label_{name}"), f"label_{name}", label)
    arrow.replace_rows(lake, schema, table, f"day >= '{FIRST}'", {})


@pytest.mark.parametrize("first", [FIRST, LAST])
def test_during_a_day_a_dataset_has_exactly_the_labels_that_are_not_null(
    own: Lake, first: date
) -> None:
    label_until(own, own.spec.day_start(LAST) + 14 * 3600)
    rows = arrow.snapshot(own, label_schemas.impressions(own.spec)).read().to_pylist()
    expected = {
        (row["impression_id"], column)
        for row in rows
        for column, name in enumerate(own.spec.objectives)
        if row["day"] >= first and row[f"label_{name}"] is not None
    }
    dataset = training.ExampleDataset(own.root, own.spec, (first, LAST), max_length=0)
    labels = [
        (impression, column)
        for batch in dataset
        for impression, mask in zip(batch.impression_ids, batch.label_mask.numpy(), strict=True)
        for column in mask.nonzero()[0].tolist()
    ]
    assert len(labels) > 100 and Counter(labels) == Counter(expected)


def test_a_dataset_has_labels_that_matured_on_a_later_day_without_impressions(own: Lake) -> None:
    every = training.ExampleDataset(own.root, own.spec, (FIRST, FIRST), max_length=0)
    before = sum(int(batch.label_mask.sum()) for batch in every)
    DeltaTable(own.table_uri("impressions")).delete(f"day > '{FIRST}'")
    without_later = training.ExampleDataset(own.root, own.spec, (FIRST, FIRST), max_length=0)
    assert sum(int(batch.label_mask.sum()) for batch in without_later) == before


def test_a_data_loader_with_workers_yields_each_batch_once(lake: Lake, spec_path: Path) -> None:
    dataset = training.ExampleDataset(lake.root, spec_path, DAYS, batch_rows=200, seed=0)
    loader = DataLoader(
        dataset, batch_size=None, num_workers=2, multiprocessing_context="spawn"
    )  # fmt: skip
    digests = sorted(batch_digest(batch) for batch in loader)
    assert digests == sorted(batch_digest(batch) for batch in dataset)


def test_a_dataset_names_days_without_examples(lake: Lake, spec_path: Path) -> None:
    with pytest.raises(UserError, match="no examples of 2026-02-01"):
        training.ExampleDataset(lake.root, spec_path, ("2026-02-01", "2026-02-01"))
    with pytest.raises(UserError, match="'yesterday' is not a day"):
        training.ExampleDataset(lake.root, spec_path, ("yesterday", str(LAST)))


def test_the_loaded_gem_predicts_what_the_teacher_predictions_hold(
    gem_lake: Lake, spec_path: Path
) -> None:
    """The latest GEM was trained until the day before the last, and scored the last day."""
    gem = training.load_gem(gem_lake.root, spec_path)
    assert gem.manifest.trained_until == LAST - timedelta(days=1)
    assert gem.objectives == tuple(gem_lake.spec.objectives)
    assert not gem.model.core.training
    stored = arrow.snapshot(gem_lake, model_schemas.teacher_predictions(gem_lake.spec)).read(
        day=LAST
    )
    logits = {row["impression_id"]: row["logit_click"] for row in stored.to_pylist()}
    for batch in gem.dataset((LAST, LAST)):
        click = gem.predict(batch)["click"]
        expected = torch.tensor([logits[impression] for impression in batch.impression_ids])
        assert not click.requires_grad
        torch.testing.assert_close(click, torch.sigmoid(expected), rtol=1e-5, atol=1e-6)


def test_a_gem_is_loaded_by_its_last_day(gem_lake: Lake, spec_path: Path) -> None:
    gem = training.load_gem(gem_lake.root, spec_path, trained_until=FIRST)
    assert gem.manifest.trained_until == FIRST
    with pytest.raises(UserError, match="no GEM was trained until 2026-02-01"):
        training.load_gem(gem_lake.root, spec_path, trained_until="2026-02-01")


def test_without_a_trained_gem_the_error_names_the_command(lake: Lake, spec_path: Path) -> None:
    with pytest.raises(UserError, match="run `gemline train gem`"):
        training.load_gem(lake.root, spec_path)
