"""Which auxiliary labels a pass trains on: each once, never before it is final."""

import math
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.system.warm_start import changed_spec, manifest_of
from etl.errors import UserError
from etl.spec import DataSpec
from etl.spec.units import DaySplit, date_range
from etl.tables.lake import SPEC_PROPERTY, Lake
from tests.conftest import FIRST, LAST
from training.config import TrainConfig
from training.data.batch import NegativeSampling, Shuffle, batch_digest
from training.data.label_window import LabelWindow
from training.data.labels import MAX_DWELL_SECONDS, Labels, labels_of
from training.data.reader import ExampleReader
from training.model.config import GemOptions
from training.trainer.resume import label_window_of_day
from training.trainer.state import latest_reader

HOUR, DAYS = 3600, 6
ENDS = [DAYS * HOUR * 24 * (n + 1) // DAYS for n in range(DAYS)]  # of the days of random labels
PASSES = [LabelWindow(end - ENDS[0], end, include_auxiliary=True) for end in ENDS]


def two_of_each(spec: dict[str, Any]) -> None:
    spec["auxiliary_objectives"] = {
        "quick_click": {"event": "ad_click", "window": "5m", "surfaces": ["feed", "reels"]},
        "view_time": {"event": "ad_view", "window": "1h", "target": "dwell"},
    }


SPEC = changed_spec(two_of_each)
CONVERSIONS = list(SPEC.objectives).index("conversion")


def random_labels(seed: int, rows: int = 60) -> pa.Table:
    """Impressions with labels that are final at any time.

    Conversions are final last, as in every valid spec one objective is.
    """
    rng = np.random.default_rng(seed)
    mature = {name: rng.integers(0, ENDS[-1] + HOUR, rows) for name in SPEC.all_objectives}
    mature["conversion"] = np.maximum.reduce(list(mature.values()))
    columns: dict[str, Any] = {"surface": rng.integers(1, 4, rows)}
    for name, ts in mature.items():
        columns[f"label_mature_ts_{name}"] = ts * 10**6 + rng.integers(0, 10**6, rows)
        columns[f"label_{name}"] = pa.array(rng.integers(0, 2, rows), mask=ts >= ENDS[-1])
    columns["value_conversion"] = rng.random(rows)
    columns["dwell_ms_view_time"] = pa.array(rng.random(rows) * 1e5, mask=rng.random(rows) < 0.4)
    return pa.table(columns)


def used(table: pa.Table, window: LabelWindow) -> Labels:
    return labels_of(SPEC, table, np.zeros(len(table)), window, "2026-01-01:2026-01-06")


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_auxiliary_labels_are_those_of_a_plain_loop(seed: int) -> None:
    """An auxiliary label goes with the first objective's label from its maturity on."""
    table = random_labels(seed)
    rows, names = table.to_pylist(), list(SPEC.auxiliary_objectives)
    passes = [used(table, window) for window in PASSES]
    for number, row in enumerate(rows):
        second = {n: row[f"label_mature_ts_{n}"] // 10**6 for n in SPEC.all_objectives}
        times = [second[name] for name in SPEC.objectives]
        for column, name in enumerate(names):
            surfaces = [SPEC.surface_codes[s] for s in SPEC.surfaces_of(name)]
            is_known = name != "view_time" or row["dwell_ms_view_time"] is not None
            trained = min(time for time in times if time >= second[name])
            expected = [
                is_known and row["surface"] in surfaces and window.start <= trained < window.end
                for window in PASSES
            ]
            assert [bool(p.extra_mask[number, column]) for p in passes] == expected
            if any(expected):
                label = row[f"label_{name}"]
                if name == "view_time":
                    label = math.log1p(row["dwell_ms_view_time"] / 1000)
                assert passes[0].extra_labels[number, column] == pytest.approx(label, rel=1e-5)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_no_auxiliary_label_is_trained_on_twice_early_or_alone(seed: int) -> None:
    table = random_labels(seed)
    mature = np.stack(
        [table[f"label_mature_ts_{n}"].to_numpy() // 10**6 for n in SPEC.auxiliary_objectives], 1
    )
    total = np.zeros(mature.shape, int)
    for window in PASSES:
        labels = used(table, window)
        total += labels.extra_mask
        assert (mature[labels.extra_mask] < window.end).all()
        assert labels.mask[labels.extra_mask.any(1)].any(1).all()
        plain = used(table, replace(window, include_auxiliary=False))
        assert plain.extra_mask.shape == (len(table), 0)
        assert (plain.mask == labels.mask).all()
    assert total.max() == 1


def test_auxiliary_labels_that_should_be_final_but_are_null_are_refused() -> None:
    table = random_labels(0)
    column = table.column_names.index("label_view_time")
    table = table.set_column(column, "label_view_time", pa.nulls(len(table), pa.int64()))
    with pytest.raises(UserError, match="labels of view_time on 2026-01-01:2026-01-06 are null"):
        used(table, PASSES[3])
    used(table, replace(PASSES[3], include_auxiliary=False))


def test_a_dwell_counts_for_at_most_a_day() -> None:
    table = random_labels(0)
    column = table.column_names.index("dwell_ms_view_time")
    table = table.set_column(column, "dwell_ms_view_time", pa.repeat(1e300, len(table)))
    labels = used(table, PASSES[0]).extra_labels[:, 1]
    assert labels == pytest.approx(math.log1p(MAX_DWELL_SECONDS))


def without_auxiliary(lake: Lake) -> Lake:
    """The same tables, read by a spec that declares no auxiliary objectives."""
    dump = lake.spec.model_dump(mode="json")
    spec = DataSpec.model_validate(dump | {"auxiliary_objectives": {}})
    plain = Lake(lake.root, spec)
    for name in ("examples", "impressions", "history", "items", "item_versions"):
        DeltaTable(plain.table_uri(name)).alter.set_table_properties(
            {SPEC_PROPERTY: plain.spec.hash}, raise_if_not_exists=False
        )
    return plain


SPLIT = DaySplit(
    train_first=FIRST, train_last=FIRST + timedelta(days=1), calibration=LAST - timedelta(days=1),
    test_first=LAST, test_last=LAST, data_until=LAST,
)  # fmt: skip


def windows_of_rankers(spec: DataSpec) -> list[LabelWindow]:
    """The labels of rankers, of their calibration, and of evaluations; and all rows to score."""
    training = LabelWindow.for_training(SPLIT, spec)
    return [
        training,
        replace(training, negative_sampling=NegativeSampling((0.5,) * len(spec.objectives), 0)),
        LabelWindow.for_calibration(SPLIT, spec),
        LabelWindow.for_test(SPLIT, spec),
        LabelWindow(0, 0, include_unlabelled=True),
    ]


def test_all_readers_but_the_training_of_gem_read_what_they_read_without_them(own: Lake) -> None:
    """Rankers, the teacher, evaluations and trees read the same batches, to the byte."""
    assert own.spec.auxiliary_objectives
    days = list(date_range(FIRST, LAST))

    def digests(lake: Lake) -> list[list[str]]:
        reader = ExampleReader.latest(lake)
        return [
            [batch_digest(batch) for batch in reader.batches(days, window, 500, Shuffle(0))]
            for window in windows_of_rankers(lake.spec)
        ]

    with_auxiliary = digests(own)
    assert digests(without_auxiliary(own)) == with_auxiliary
    assert all(with_auxiliary)


@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_gem_trains_on_the_same_rows_and_batches_with_auxiliary_labels(
    lake: Lake, weight: float
) -> None:
    config = TrainConfig(scale="tiny", model=GemOptions(auxiliary_weight=weight))
    reader, manifest = latest_reader(lake, config), manifest_of(lake.spec, config)
    width = len(lake.spec.auxiliary_objectives) if weight else 0
    counts: Counter[str] = Counter()
    for day in date_range(FIRST, LAST):
        window = label_window_of_day(lake, day, manifest)
        assert window.include_auxiliary == (weight > 0)
        days = list(date_range(FIRST, day))
        plain = reader.batches(days, replace(window, include_auxiliary=False), 200, Shuffle(0))
        for batch, other in zip(reader.batches(days, window, 200, Shuffle(0)), plain, strict=True):
            assert batch.impression_ids.tolist() == other.impression_ids.tolist()
            assert batch.label_mask.equal(other.label_mask)
            assert batch.extra_labels.shape[1] == width
            rows, _ = np.nonzero(batch.extra_mask.numpy())
            counts.update(batch.impression_ids[rows].tolist())
    assert set(counts.values()) == ({1} if weight else set())
    assert len(counts) > 50 or not weight
