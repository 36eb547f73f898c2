"""Histories that are read for some requests equal those of all users, within bounded memory."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, convert_to_deltalake
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.array_types import Int64
from etl.errors import UserError
from etl.spec import DataSpec
from etl.tables import arrow, schemas
from etl.tables.arrow import Snapshot
from etl.tables.lake import Lake, arrow_schema
from features.history.build import pack_user_days
from features.history.compact import compact_users
from training.data.batch import Shuffle
from training.data.histories import HistoryCache, NeededEvents, histories_from_table
from training.data.label_window import LabelWindow
from training.data.reader import ExampleReader

NUM_USERS, NUM_DAYS = 5, 6


def random_history(rng: np.random.Generator, num_events: int) -> pa.Table:
    """Packed rows of users by day, in any order."""
    user, day = rng.integers(0, NUM_USERS, num_events), rng.integers(0, NUM_DAYS, num_events)
    visible = day * 100 + rng.integers(0, 100, num_events)
    order = np.lexsort((visible, user))
    events = pa.table(
        {
            "user_id": np.char.add("u", user.astype(str)),
            "day": pa.array(day.astype(np.int32), pa.int32()).cast(pa.date32()),
            "visible_ts": visible,
            "event_ts": visible * 1_000_000,
            "item_index": pa.array(rng.integers(0, 1000, num_events).astype(np.int32)),
            "surface": pa.array(rng.integers(1, 3, num_events).astype(np.int8)),
            "type": pa.array(rng.integers(1, 4, num_events).astype(np.int8)),
            "dwell_ms": pa.array(rng.random(num_events) * 1e4),
        }
    ).take(pa.array(order))
    rows = pack_user_days(events)
    rows = rows.append_column("chunk", pa.nulls(len(rows), pa.int32()))
    rows = rows.append_column("dropped", pa.array(np.zeros(len(rows), np.int32)))
    return rows.take(pa.array(rng.permutation(len(rows))))


def compact_first_days(rows: pa.Table, max_events: int) -> pa.Table:
    """The rows with those of the first half of the days compacted."""
    rows = rows.sort_by([("user_id", "ascending"), ("day", "ascending")])
    early = pa.compute.less(rows["day"].cast(pa.int32()), NUM_DAYS // 2)
    compacted = compact_users(rows.filter(early).drop(["day"]).combine_chunks(), max_events, 0)
    day = pa.array(np.full(len(compacted), NUM_DAYS // 2 - 1, np.int32)).cast(pa.date32())
    compacted = compacted.append_column("day", day).select(rows.column_names)
    late = rows.filter(pa.compute.invert(early))
    return pa.concat_tables([late, compacted.cast(late.schema)])


@settings(max_examples=150)
@given(
    st.integers(0, 2**32), st.integers(1, 120), st.integers(1, 15), st.integers(1, 20),
    st.sampled_from([(), (1,), (2, 3)]),
)  # fmt: skip
def test_needed_rows_give_the_slices_of_all_rows(
    seed: int, num_events: int, max_events: int, kept: int, event_types: tuple[int, ...]
) -> None:
    """For random pointers, with and without compaction and a selection of events."""
    rng = np.random.default_rng(seed)
    table = random_history(rng, num_events)
    if rng.random() < 0.5 and min(table["day"].cast(pa.int32()).to_pylist()) < NUM_DAYS // 2:
        table = compact_first_days(table, kept)
    complete = histories_from_table(table, event_types)
    ids = pa.array([f"u{n}" for n in rng.integers(0, NUM_USERS, 4)])
    user = complete.user_positions(ids)
    as_of = rng.integers(0, NUM_DAYS * 100, len(ids))
    length = pointers(complete.events.offsets, complete.events.visible_ts, user, as_of)
    length += np.append(complete.dropped_events, 0)[user]
    expected = complete.slices(user, as_of, length, max_events)
    needed = NeededEvents.of_requests(ids, length, None if event_types else max_events)
    of_users = table.filter(pa.compute.is_in(table["user_id"], ids))
    read = histories_from_table(of_users, event_types, needed)
    found = read.slices(read.user_positions(ids), as_of, length, max_events)
    assert found.events.tobytes() == expected.events.tobytes()
    np.testing.assert_array_equal(found.offsets, expected.offsets)
    assert len(read.events.item_indexes) <= len(complete.events.item_indexes)


def pointers(offsets: Int64, visible_ts: Int64, user: Int64, as_of: Int64) -> Int64:
    """The number of stored events of each request's user before its second."""
    bounds = [(offsets[u], offsets[u + 1]) if u >= 0 else (0, 0) for u in user]
    counts = [
        int((visible_ts[begin:end] < second).sum())
        for (begin, end), second in zip(bounds, as_of, strict=True)
    ]
    return np.array(counts, np.int64)


def test_rows_before_the_longest_history_are_not_decoded() -> None:
    events = 50 * NUM_USERS * NUM_DAYS
    table = random_history(np.random.default_rng(0), events)
    ids = pa.array([f"u{n}" for n in range(NUM_USERS)])
    complete = histories_from_table(table)
    length = np.diff(complete.events.offsets)
    read = histories_from_table(table, (), NeededEvents.of_requests(ids, length, 10))
    assert len(read.events.item_indexes) < 2 * events / NUM_DAYS
    assert read.dropped_events.sum() + len(read.events.item_indexes) == events


def test_pointers_to_events_that_compaction_removed_are_refused() -> None:
    table = compact_first_days(random_history(np.random.default_rng(0), 400), 2)
    ids = pa.array(["u1"])
    needed = NeededEvents.of_requests(ids, np.array([1]), 5)
    of_user = table.filter(pa.compute.equal(table["user_id"], "u1"))
    read = histories_from_table(of_user, (), needed)
    with pytest.raises(UserError, match="histories were compacted"):
        read.slices(read.user_positions(ids), np.array([50]), np.array([1]), 5)


def test_matching_rows_are_those_of_a_filter(lake_spec: DataSpec, tmp_path: Path) -> None:
    """Whatever row groups they are in."""
    schema = schemas.history(lake_spec)
    rows = random_history(np.random.default_rng(0), 500).sort_by("user_id")
    fields = [f for f in arrow_schema(schema) if f.name in rows.column_names and f.name != "day"]
    file = rows.select([field.name for field in fields]).cast(pa.schema(fields))
    pq.write_table(file, tmp_path / "part.parquet", row_group_size=4)
    convert_to_deltalake(str(tmp_path))
    stored = Snapshot(schema, 0, (("part.parquet", {}),), DeltaTable(str(tmp_path)))
    names = [field.name for field in fields]
    for users in (["u2"], ["u0", "u4", "v"], ["a", "u"], []):
        found = stored.read_matching("user_id", pa.array(users, pa.string()), names)
        expected = file.filter(pa.compute.is_in(file["user_id"], pa.array(users, pa.string())))
        assert found.equals(expected)


def test_a_reader_with_little_memory_reads_the_same_batches(lake: Lake) -> None:
    """Histories of other buckets are forgotten, and read again in the next pass."""
    readers = [ExampleReader.latest(lake) for _ in range(2)]
    days = readers[0].days()[:3]
    window = LabelWindow(0, lake.spec.day_end(readers[0].days()[-1]))
    snapshot = arrow.snapshot(lake, schemas.history(lake.spec))
    readers[1]._histories = HistoryCache(snapshot, (), max_bytes=1)
    for seed in range(2):
        passes = [reader.batches(days, window, 256, Shuffle(seed)) for reader in readers]
        for kept, read_again in zip(*passes, strict=True):
            assert kept.impression_ids.tolist() == read_again.impression_ids.tolist()
            assert kept.history.item_index.equal(read_again.history.item_index)
            assert kept.history.age_seconds.equal(read_again.history.age_seconds)
    assert len(readers[1]._histories._cached) == 1 < len(readers[0]._histories._cached)
