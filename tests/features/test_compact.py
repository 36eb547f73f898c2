"""Compaction: pointers select the same events as before, or reading them raises an error."""

from datetime import date, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.errors import UserError
from etl.tables import schemas
from etl.tables.arrow import snapshot
from etl.tables.lake import Lake
from features.examples import build_examples
from features.history.build import build_history, pack_user_days
from features.history.codec import decode_rows, delta_decode
from features.history.compact import (
    EVENTS_PER_CHUNK,
    compact_history,
    compact_users,
    due_compaction,
    last_compactable_day,
)
from features.history.compacted import compacted_until
from tests.oracle.disorder import FIRST, build_lake, generate_records
from tests.pipeline import rows
from tests.world import copy_of
from training.data.histories import histories_from_table

pytestmark = pytest.mark.spark

Days = list[list[int]]  # of a user: the seconds between events, by day
gaps = st.integers(0, 3) | st.integers(0, 100_000)
gaps_of_day = st.lists(gaps, min_size=1, max_size=12)
users = st.lists(st.lists(gaps_of_day, min_size=1, max_size=4), min_size=1, max_size=6)


def pack_users(users: list[Days]) -> tuple[pa.Table, list[list[int]]]:
    """Packed rows of users by day, and the visible second of each event by user."""
    tables: list[pa.Table] = []
    seconds: list[list[int]] = []
    for number, days in enumerate(users):
        now = 0
        seconds.append([])
        for day, day_gaps in enumerate(days):
            visible = [int(second) for second in now + np.cumsum(day_gaps)]
            now = visible[-1]
            seconds[-1] += visible
            size = len(visible)
            events = pa.table(
                {
                    "user_id": [f"u{number}"] * size,
                    "day": pa.array([day] * size, pa.date32()),
                    "visible_ts": pa.array(visible, pa.int64()),
                    "event_ts": pa.array([v * 1_000_000 for v in visible], pa.int64()),
                    "item_index": pa.array(range(size), pa.int32()),
                    "surface": pa.array([1] * size, pa.int8()),
                    "type": pa.array([2] * size, pa.int8()),
                    "dwell_ms": pa.array([None] * size, pa.float64()),
                }
            )
            tables.append(pack_user_days(events))
    rows = pa.concat_tables(tables).drop(["day"])
    return rows.append_column("dropped", pa.nulls(len(rows), pa.int32()).fill_null(0)), seconds


@given(users, st.integers(1, 30), st.integers(0, 200_000))
def test_the_latest_events_are_kept_and_dropped_ones_are_counted(
    users: list[Days], max_events: int, min_visible_ts: int
) -> None:
    table, seconds = pack_users(users)
    compacted = compact_users(table, max_events, min_visible_ts)
    assert compacted["user_id"].to_pylist() == [f"u{i}" for i in range(len(users))]
    retained = [
        [s for s in visible[-max_events:] if s >= min_visible_ts] or visible[-1:]
        for visible in seconds
    ]
    for row, visible, expected in zip(compacted.to_pylist(), seconds, retained, strict=True):
        assert row["events"] == len(expected)
        assert row["dropped"] == len(visible) - len(expected)
    lengths = compacted["events"].to_numpy().astype(np.int64)
    lists = decode_rows(compacted, lengths)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    decoded = delta_decode(compacted["first_ts"].to_numpy(), lists["gaps"], offsets)
    assert decoded.tolist() == [s for user in retained for s in user]
    assert {len(values) for values in lists.values()} == {len(decoded)}


@given(st.integers(1, 3 * EVENTS_PER_CHUNK))
@settings(max_examples=20)
def test_rows_hold_at_most_a_chunk_and_compaction_is_idempotent(size: int) -> None:
    table, _ = pack_users([[[1] * size]])
    once = compact_users(table, 10**6, 0)
    lengths = [row["events"] for row in once.to_pylist()]
    assert all(a == EVENTS_PER_CHUNK for a, _ in pairwise(lengths)) and sum(lengths) == size
    assert once["chunk"].to_pylist() == list(range(len(lengths)))
    assert compact_users(once, 10**6, 0).equals(once)


UNTIL = FIRST + timedelta(days=1)
NEWEST = FIRST + timedelta(days=6)
OLDEST_LATE = NEWEST - timedelta(days=1)  # files are accepted a day late


@pytest.fixture(scope="module")
def built(spark: object, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Seven days of tables."""
    return build_lake(tmp_path_factory.mktemp("compact"), generate_records(3, 25, 7), [(0, 6)])


@pytest.fixture
def lake_copy(built: Lake, tmp_path: Path) -> Lake:
    return copy_of(built, tmp_path / "lake")


def examples_of(lake: Lake) -> list[dict[str, Any]]:
    return rows(lake, "examples")


def last_events(
    lake: Lake, impressions: set[str] | None = None
) -> dict[str, list[tuple[int, ...]]]:
    """The last two events of each example's history, for all examples or some."""
    packed = snapshot(lake, schemas.history(lake.spec))
    events = {}
    for bucket in range(lake.spec.buckets):
        histories = histories_from_table(packed.read(bucket=bucket))
        for row in examples_of(lake):
            id_: str = row["impression_id"]
            if row["bucket"] != bucket or (impressions and id_ not in impressions):
                continue
            user = histories.user_positions(pa.array([row["user_id"]]))
            as_of = np.array([row["as_of_ts"]])
            slices = histories.slices(user, as_of, np.array([row["history_length"]]), 2)
            events[id_] = slices.events.tolist()
    return events


def test_compaction_preserves_examples_and_the_histories_they_read(
    lake_copy: Lake, built: Lake
) -> None:
    """This holds for the compacted days and for all days that late files rebuild."""
    expected = last_events(lake_copy)
    compact_history(lake_copy, last_compactable_day(lake_copy))
    assert compacted_until(lake_copy) == UNTIL and compacted_until(built) is None
    assert len(rows(lake_copy, "history")) < len(rows(built, "history"))
    assert last_events(lake_copy) == expected
    for step in (build_history, build_examples):
        step(lake_copy, (OLDEST_LATE, NEWEST))
    assert rows(lake_copy, "examples") == rows(built, "examples")
    assert last_events(lake_copy) == expected


def test_days_that_counters_need_or_that_are_compacted_are_refused(lake_copy: Lake) -> None:
    with pytest.raises(UserError, match=rf"--until .*: .*compact up to {UNTIL} at most"):
        compact_history(lake_copy, NEWEST)
    compact_history(lake_copy, UNTIL)
    message = f"histories up to {UNTIL} are compacted: 2026-"
    with pytest.raises(UserError, match=message):
        build_examples(lake_copy, (UNTIL + timedelta(days=3), UNTIL + timedelta(days=3)))
    for days in ((FIRST, FIRST), (UNTIL, UNTIL), (UNTIL, NEWEST), (FIRST - timedelta(1), FIRST)):
        with pytest.raises(UserError, match=message):
            build_history(lake_copy, days)


@pytest.mark.parametrize(
    "last", [pytest.param(UNTIL, marks=pytest.mark.proof), UNTIL + timedelta(days=1)]
)
def test_all_compacted_days_can_be_built_again_at_once(
    lake_copy: Lake, built: Lake, last: date
) -> None:
    compact_history(lake_copy, UNTIL)
    build_history(lake_copy, (FIRST, last))
    assert compacted_until(lake_copy) is None
    assert rows(lake_copy, "history") == rows(built, "history")


def test_histories_are_compacted_when_enough_days_can_be(lake_copy: Lake, built: Lake) -> None:
    def every(days: int) -> Lake:
        history = lake_copy.spec.history.model_copy(update={"compact_every": days * 86_400})
        return Lake(lake_copy.root, lake_copy.spec.model_copy(update={"history": history}))

    compactable = (UNTIL - FIRST).days + 1
    assert due_compaction(every(compactable), keep_days=0) == UNTIL
    assert due_compaction(every(compactable + 1), keep_days=0) is None
    assert due_compaction(every(1), keep_days=6) == NEWEST - timedelta(days=6)
    assert due_compaction(every(1), keep_days=7) is None
    compact_history(every(1), UNTIL - timedelta(days=1))
    assert due_compaction(every(1), keep_days=0) == UNTIL
    assert due_compaction(every(2), keep_days=0) is None


def test_reading_dropped_events_is_an_error(lake_copy: Lake) -> None:
    expected = last_events(lake_copy)
    history = lake_copy.spec.history.model_copy(update={"max_events": 3})
    short = lake_copy.spec.model_copy(update={"history": history})
    compact_history(Lake(lake_copy.root, short), UNTIL)
    end = lake_copy.spec.day_end(UNTIL)
    later = {row["impression_id"] for row in examples_of(lake_copy) if row["as_of_ts"] >= end}
    assert later
    assert last_events(lake_copy, later) == {id_: expected[id_] for id_ in later}
    with pytest.raises(UserError, match="these examples point at events that were removed"):
        last_events(lake_copy)
