"""Counters are the same to the last bit, whether or not events of a key are summed by second."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from etl.spec import load_spec
from features.counters import counting
from features.counters.counting import (
    _counted_batches,
    _unpack_numbers,
    count_events,
    first_and_last_in_tiles,
)
from features.counters.key_prefixes import find_hot_prefixes
from tests.oracle.disorder import SPEC

pytestmark = pytest.mark.spark

EVENTS, QUERIES, DAY = 3000, 400, 86_400


def random_keys(rng: np.random.Generator, size: int) -> dict[str, pa.Array]:
    """Keys of which some are null; one item has most events."""
    keys = {
        "key_user": rng.integers(0, 20, size),
        "key_item": np.where(rng.random(size) < 0.7, 0, rng.integers(1, 30, size)),
        "key_surface": rng.integers(1, 3, size),
        "key_brand": rng.integers(0, 4, size),
        "key_plan": rng.integers(1, 3, size),
        "key_device": rng.integers(1, 4, size),
        "key_hour": rng.integers(1, 4, size),
    }
    is_null = {
        n: rng.random(size) < 0.1 * (n in ("key_brand", "key_plan", "key_device")) for n in keys
    }
    return {name: pa.array(values, mask=is_null[name]) for name, values in keys.items()}


def test_counters_do_not_depend_on_which_keys_have_many_events(
    spark: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    spec, rng = load_spec(tmp_path / "spec.yaml"), np.random.default_rng(0)
    dwell = rng.choice([0.5, 1.5, 700, 2500.5, 1e9], EVENTS)
    value = rng.choice([-1e12, -2.5e-4, 0.5e-4, 0.1, 7.25, 1e12], EVENTS)
    events = pa.table(
        {
            "visible_ts": 1_000_000 + rng.integers(0, 600, EVENTS) * 300,
            "type": pa.array(rng.integers(1, 5, EVENTS), pa.int8()),
            "dwell_ms": pa.array(dwell, mask=rng.random(EVENTS) < 0.3),
            "value": pa.array(value, mask=rng.random(EVENTS) < 0.3),
            "item_hash": rng.integers(0, 500, EVENTS),
            "event_quantity": rng.choice([np.nan, 0.25, 3, 1e12], EVENTS),
            "ctx_screen": rng.choice([4.7, 6.1], EVENTS),
            "key_coupon": pa.array(rng.integers(1, 99, EVENTS), mask=rng.random(EVENTS) < 0.3),
            **random_keys(rng, EVENTS),
        }
    )
    queries = pa.table(
        {
            "impression_id": [str(number) for number in range(QUERIES)],
            "as_of_ts": 1_000_000 + DAY + rng.integers(0, 300, QUERIES) * 300,
            **random_keys(rng, QUERIES),
        }
    )
    frames = spark.createDataFrame(events), spark.createDataFrame(queries)
    expected = count_events(spec, *frames).toArrow().sort_by("impression_id")
    assert len(expected) == QUERIES and np.count_nonzero(expected["seen"]) == QUERIES
    prefixes = {}
    for min_events in (1, EVENTS // 2, EVENTS + 1):
        hot = find_hot_prefixes(spec, frames[0], min_events)
        prefixes[min_events] = hot.count()
        counted = count_events(spec, *frames, hot).toArrow().sort_by("impression_id")
        for name in expected.column_names:
            assert counted[name].to_pylist() == expected[name].to_pylist(), (min_events, name)
    assert prefixes == {1: 30 + 2 + 2 + 3, EVENTS // 2: 2, EVENTS + 1: 0}, (
        "of items, surfaces, plans, hours"
    )


def test_distinct_counts_of_hot_keys_read_a_bounded_number_of_rows(spark: SparkSession) -> None:
    """Every window as long as a tile has the entries that it has in all rows, and few rows do."""
    rng, tile, size = np.random.default_rng(1), 600, 20_000
    rows = pa.table(
        {
            "key": pa.array(np.zeros(size), pa.int32()),
            "key_hash": rng.integers(0, 2, size),
            "ts": rng.integers(-1000, 3000, size),
            "type": pa.array(rng.integers(1, 3, size), pa.int8()),
            "entry": pa.array(rng.choice([0, 65, 66, 67, 130, 131, 700], size), pa.int16()),
        }
    )
    kept = first_and_last_in_tiles(spark.createDataFrame(rows), "entry", tile).toArrow()
    tiles = {(n // tile) for n in rows["ts"].to_pylist()}
    assert len(kept) <= 2 * 6 * len(tiles) * 4 < size / 20, "entries, tiles, keys and types"
    everything, few = (
        np.stack([table[name].to_numpy() for name in ("key_hash", "type", "ts", "entry")], 1)
        for table in (rows, kept)
    )
    everything = everything[everything[:, 3] != 0]
    for end in rng.integers(-1000, 4500, 200):
        start = end - rng.choice([tile, tile + 1, 2000])
        of_all, of_few = (
            table[(table[:, 2] >= start) & (table[:, 2] < end)][:, [0, 1, 3]]
            for table in (everything, few)
        )
        assert np.array_equal(np.unique(of_all, axis=0), np.unique(of_few, axis=0)), (start, end)


def test_values_of_many_impressions_are_packed_in_several_arrays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The offsets of an array have 32 bits."""
    values = np.random.default_rng(0).normal(size=(57, 3))
    ids = pa.array([str(number) for number in range(57)])
    monkeypatch.setattr(counting, "MAX_BYTES", 100)
    batches = list(_counted_batches(ids, 4, values))
    assert [len(batch) for batch in batches] == [4] * 14 + [1]
    table = pa.Table.from_batches(batches).combine_chunks()
    assert table["impression_id"].to_pylist() == ids.to_pylist()
    assert set(table["key"].to_pylist()) == {4}
    packed = table["values"].combine_chunks()
    assert (_unpack_numbers(packed, 3) == values).all()
    (empty,) = _counted_batches(ids[:0], 4, values[:0])
    assert len(empty) == 0
