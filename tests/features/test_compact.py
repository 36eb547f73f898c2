"""Compaction: pointers cut the same events as before, or say that those were given up."""

from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.errors import UserError
from etl.spec.model import History
from etl.tables import contracts
from etl.tables.arrow import snapshot
from etl.tables.lake import Lake
from features.examples import build_examples
from features.history.build import build_history, pack_users
from features.history.compact import CHUNK, compact, compact_users, compacted_until
from features.history.pack import visible_from
from features.history.planes import unpack
from tests.oracle.disorder import FIRST, lake_of, make
from tests.pipeline import rows
from tests.world import copy_of
from training.data.histories import unpacked

pytestmark = pytest.mark.spark

gap = st.integers(0, 3) | st.integers(0, 100_000)
day = st.lists(gap, min_size=1, max_size=12)
users = st.lists(st.lists(day, min_size=1, max_size=4), min_size=1, max_size=6)


def packed(users: list[list[list[int]]]) -> tuple[pa.Table, list[list[int]]]:
    """Packed rows of users by day, and the visible second of each event."""
    tables, seconds = [], []
    for number, days in enumerate(users):
        now = 0
        seconds.append([])
        for at, day_gaps in enumerate(days):
            visible = list(now + np.cumsum(day_gaps))
            now = visible[-1]
            seconds[-1] += visible
            size = len(visible)
            tables.append(pack_users(pa.table({
                "user_id": [f"u{number}"] * size,
                "day": pa.array([at] * size, pa.date32()),
                "visible_ts": pa.array(visible, pa.int64()),
                "event_ts": pa.array([v * 1_000_000 for v in visible], pa.int64()),
                "item_ix": pa.array(range(size), pa.int32()),
                "surface": pa.array([1] * size, pa.int8()),
                "type": pa.array([2] * size, pa.int8()),
                "dwell_ms": pa.array([None] * size, pa.float64()),
            })))  # fmt: skip
    whole = pa.concat_tables(tables).drop(["day"])
    return whole.append_column("dropped", pa.nulls(len(whole), pa.int32()).fill_null(0)), seconds


@given(users, st.integers(1, 30), st.integers(0, 200_000))
def test_the_newest_events_stay_and_the_others_are_counted(users, most: int, oldest: int) -> None:
    table, seconds = packed(users)
    found = compact_users(table, most, oldest)
    assert found["user_id"].to_pylist() == [f"u{i}" for i in range(len(users))]
    kept = [[s for s in every[-most:] if s >= oldest] or every[-1:] for every in seconds]
    for row, all_of_them, expected in zip(found.to_pylist(), seconds, kept, strict=True):
        assert row["events"] == len(expected)
        assert row["dropped"] == len(all_of_them) - len(expected)
    lengths = found["events"].to_numpy().astype(np.int64)
    flat = unpack(found, lengths)
    cuts = np.concatenate(([0], np.cumsum(lengths)))
    told = visible_from(found["first_ts"].to_numpy(), flat["gaps"], cuts)
    assert told.tolist() == [s for user in kept for s in user]
    assert {len(values) for values in flat.values()} == {len(told)}


@given(st.integers(1, 3 * CHUNK))
@settings(max_examples=20)
def test_rows_hold_no_more_than_a_chunk_and_again_changes_nothing(size: int) -> None:
    table, (_seconds,) = packed([[[1] * size]])
    once = compact_users(table, 10**6, 0)
    lengths = [row["events"] for row in once.to_pylist()]
    assert all(a == CHUNK for a, _ in pairwise(lengths)) and sum(lengths) == size
    assert once["chunk"].to_pylist() == list(range(len(lengths)))
    assert compact_users(once, 10**6, 0).equals(once)


UNTIL = FIRST + timedelta(days=2)
NEWEST = FIRST + timedelta(days=5)


@pytest.fixture(scope="module")
def built(spark: object, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Six days of tables."""
    return lake_of(tmp_path_factory.mktemp("compact"), make(3, 25, 6), [(0, 5)])


@pytest.fixture
def own(built: Lake, tmp_path: Path) -> Lake:
    return copy_of(built, tmp_path / "lake")


def sliced(lake: Lake, wanted: set[str] | None = None) -> dict[str, list[tuple[int, ...]]]:
    """The last two events that each example sees, of all or of some."""
    packed = snapshot(lake, contracts.history(lake.spec))
    found = {}
    for bucket in range(lake.spec.buckets):
        stored = unpacked(packed.read(bucket=bucket))
        for row in rows(lake, "examples"):
            if row["bucket"] != bucket or (wanted and row["impression_id"] not in wanted):
                continue
            user = stored.find(pa.array([row["user_id"]]))
            as_of = np.array([row["as_of_ts"]])
            cut = stored.slices(user, as_of, np.array([row["hist_len"]]), 2)
            found[row["impression_id"]] = cut.events.tolist()
    return found


def test_compaction_changes_nothing_that_is_read(own: Lake, built: Lake) -> None:
    """Neither of the days that are compacted nor of a day that is built after it."""
    expected = sliced(own)
    compact(own, UNTIL)
    assert compacted_until(own) == UNTIL and compacted_until(built) is None
    assert len(rows(own, "history")) < len(rows(built, "history"))
    assert sliced(own) == expected
    for step in (build_history, build_examples):
        step(own, (NEWEST, NEWEST))
    assert rows(own, "examples") == rows(built, "examples")
    assert sliced(own) == expected


def test_what_can_no_longer_be_told_is_refused(own: Lake) -> None:
    with pytest.raises(UserError, match=rf"--until .*: .*compact up to {UNTIL} at most"):
        compact(own, NEWEST)
    compact(own, UNTIL)
    for step, day in ((build_history, UNTIL), (build_examples, UNTIL + timedelta(days=1))):
        with pytest.raises(UserError, match=f"histories up to {UNTIL} are compacted: 2026-"):
            step(own, (day, day))


def test_what_was_given_up_is_not_read_in_silence(own: Lake) -> None:
    before = sliced(own)
    short = own.spec.model_copy(update={"history": History(most_events=3)})
    compact(Lake(own.root, short), UNTIL)
    end = own.spec.day_end(UNTIL)
    late = {row["impression_id"] for row in rows(own, "examples") if row["as_of_ts"] >= end}
    assert late
    assert sliced(own, late) == {i: before[i] for i in late}
    with pytest.raises(UserError, match="these examples lie before what is kept"):
        sliced(own)
