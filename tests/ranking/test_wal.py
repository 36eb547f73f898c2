"""An acknowledged post is in every feature store, even if processes are killed."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest

from etl.errors import UserError
from etl.spec.units import DAY
from etl.tables import arrow, schemas
from etl.tables.lake import Lake
from etl.tables.pointer import VersionPointer
from ranking.feature_store import storage, table_source
from ranking.feature_store.attributes import AttributeVersion
from ranking.feature_store.events import Event, ingest_event
from ranking.feature_store.materialize import HistoryLengths, build_feature_store, next_store_name
from ranking.feature_store.storage import StorageFullError, storage_key
from ranking.feature_store.store import FeatureStore, open_store
from ranking.feature_store.wal import FeatureStoreHandle, WalEntry, feature_store_pointer, open_wal
from tests.conftest import FIRST, LAST, ROOT
from tests.ranking.poster import event_of, switch_to_live_store, times_counted

EVE = LAST - timedelta(days=1)
MICROS = 1_000_000


@pytest.fixture(scope="module")
def built_stores(lake: Lake, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores of the day before the last, of the last day, and of the empty days after it."""
    root = tmp_path_factory.mktemp("stores")
    for days in range(-1, 4):
        day = LAST + timedelta(days=days)
        end = lake.spec.day_end(day)
        build_feature_store(lake, root / f"{day}", end, HistoryLengths("behaviour", 40)).close()
    return root


@pytest.fixture
def root(built_stores: Path, tmp_path: Path) -> Path:
    """A lake with feature stores only; the one of the day before the last is live."""
    root = tmp_path / "lake"
    shutil.copytree(built_stores, root / "feature_store")
    feature_store_pointer(str(root)).promote(str(EVE))
    return root


@pytest.fixture
def live(root: Path, lake: Lake) -> Iterator[FeatureStoreHandle]:
    handle = FeatureStoreHandle(str(root), lake.spec)
    yield handle
    handle.close()


def events_of_day(lake: Lake, day: date, table: str = "events") -> list[Event]:
    """Events of a table that landed on a day, as they would have been posted."""
    spec = lake.spec
    surfaces = {code: name for name, code in spec.surface_codes.items()}
    types = {code: name for name, code in spec.event_codes.items()}
    schema = schemas.table_schema(spec, table)
    rows = arrow.snapshot(lake, schema).read(day=day).sort_by("ingest_ts")
    return [
        Event(
            row["event_id"], row["user_id"], row["item_id"], surfaces[row["surface"]],
            types[row["type"]], row["event_ts"], row["ingest_ts"], row["dwell_ms"],
        )
        for row in rows.to_pylist()
    ]  # fmt: skip


def wal_entry(event: Event) -> WalEntry:
    return WalEntry("event", event.ingest_ts, event)


def post_all(live: FeatureStoreHandle, events: Iterable[Event]) -> int:
    """Post events and return how many were new."""
    return live.write([[wal_entry(event) for event in events]])[0]


def event_at_end_of(lake: Lake, day: date, **changes: Any) -> Event:
    now = lake.spec.day_end(day) * MICROS - 1
    return replace(Event("posted", "new", "ad-1", "feed", "ad_click", now, now), **changes)


def table_content(store: FeatureStore, table: str) -> dict[bytes, bytes]:
    with store.read_transaction() as txn:
        return dict(txn.iterate_from(table, b"\0"))


def test_an_event_posted_again_is_not_new(live: FeatureStoreHandle, lake: Lake) -> None:
    event = event_at_end_of(lake, LAST)
    assert live.write([[wal_entry(event), wal_entry(event)], [wal_entry(event)]]) == [1, 0]
    assert post_all(live, [event]) == 0 and times_counted(live.store, "new") == (1, 1)


def test_a_newer_store_has_posted_events_and_counts_them_once(
    live: FeatureStoreHandle, lake: Lake, root: Path, built_stores: Path
) -> None:
    """Events of the last day are posted, then land: the store equals one from the tables alone."""
    assert post_all(live, events_of_day(lake, LAST)) > 100
    assert post_all(live, [event_at_end_of(lake, LAST, event_id="later")]) == 1
    feature_store_pointer(str(root)).promote(str(LAST))
    switch_to_live_store(live)
    assert live.store.folder.name == str(LAST)
    expected = store_of_last_day(built_stores, root, lake)
    with expected.write_transaction() as txn:
        ingest_event(expected, txn, event_at_end_of(lake, LAST, event_id="later"))
    assert_same_behavior(live.store, expected)


def store_of_last_day(built_stores: Path, root: Path, lake: Lake) -> FeatureStore:
    """The store of the last day, as it was built."""
    shutil.copytree(built_stores / str(LAST), root / "pristine")
    return open_store(root / "pristine", lake.spec)


def assert_same_behavior(store: FeatureStore, other: FeatureStore) -> None:
    """Compare histories and counters, and close the other store."""
    for table in ("history", "recent_history", "hours", "minutes", "seconds"):
        assert table_content(store, table) == table_content(other, table), table
    other.close()


def test_events_posted_before_a_restart_are_in_a_store_promoted_meanwhile(
    root: Path, lake: Lake
) -> None:
    before = FeatureStoreHandle(str(root), lake.spec)
    post_all(before, [event_at_end_of(lake, LAST)])
    before.close()
    feature_store_pointer(str(root)).promote(str(LAST))
    after = FeatureStoreHandle(str(root), lake.spec)
    assert times_counted(after.store, "new") == (1, 1)
    after.close()


def test_no_event_is_lost_when_the_clock_goes_back(
    live: FeatureStoreHandle, lake: Lake, root: Path
) -> None:
    now = lake.spec.day_end(LAST) * MICROS
    for number in range(5):
        earlier = now - number * 3600 * MICROS
        event = event_at_end_of(
            lake, LAST, event_id=f"{number}", event_ts=earlier, ingest_ts=earlier
        )
        assert post_all(live, [event]) == 1
    feature_store_pointer(str(root)).promote(str(LAST))
    switch_to_live_store(live)
    assert times_counted(live.store, "new") == (5, 5)


def test_an_event_that_never_lands_is_kept_until_the_tables_are_final(
    live: FeatureStoreHandle, lake: Lake, root: Path
) -> None:
    """Each newer store receives it, until the log is trimmed."""
    post_all(live, [event_at_end_of(lake, EVE)])
    counted = {}
    for days in range(-1, 4):
        feature_store_pointer(str(root)).promote(str(LAST + timedelta(days=days)))
        switch_to_live_store(live)
        counted[days] = times_counted(live.store, "new")[0], len(wal_entries(live))
    last_day = lake.spec.allowed_lateness_days  # after the day on which it would have landed
    assert counted == {days: (1, 1) if days <= last_day else (0, 0) for days in counted}


def wal_entries(live: FeatureStoreHandle) -> list[tuple[int, WalEntry]]:
    return list(live.wal.entries_after(0))


def test_events_in_the_tables_count_once_if_they_are_posted_late(
    live: FeatureStoreHandle, lake: Lake, root: Path, built_stores: Path
) -> None:
    """All events are posted as late as the spec allows, to a store that has none of them."""
    delay = lake.spec.allowed_lateness * MICROS
    for day in range((LAST - FIRST).days + 1):
        events = events_of_day(lake, FIRST + timedelta(days=day))
        late = [wal_entry(replace(event, ingest_ts=event.event_ts + delay)) for event in events]
        assert live.wal.append([late], lambda _: False) == [len(late)]
    feature_store_pointer(str(root)).promote(str(LAST))
    switch_to_live_store(live)
    assert_same_behavior(live.store, store_of_last_day(built_stores, root, lake))


def test_events_of_two_logs_with_one_id_are_both_counted_once(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a newer store whose tables have one of them; without a log, the id is known."""
    monkeypatch.setattr(table_source, "are_ids_by_log", lambda _: True)
    folder, lengths = tmp_path / "feature_store", HistoryLengths("behaviour", 40)
    for day in (EVE, LAST):
        build_feature_store(lake, folder / f"{day}", lake.spec.day_end(day), lengths).close()
    pointer = feature_store_pointer(str(tmp_path))
    pointer.promote(str(EVE))
    arrived = next(event for event in events_of_day(lake, LAST) if event.type == "ad_click")
    of_log = {
        log: replace(arrived, user=f"user of {log}", log=log) for log in ("events", "app", None)
    }
    with closing(FeatureStoreHandle(str(tmp_path), lake.spec)) as live:
        for posted in ("events", "app"):
            assert post_all(live, [of_log[posted]] * 2) == 1
            assert times_counted(live.store, of_log[posted].user) == (1, 1)
        assert post_all(live, of_log.values()) == 0
        pointer.promote(str(LAST))
        switch_to_live_store(live)
        assert times_counted(live.store, of_log["events"].user)[1] == 0, "the tables have it"
        assert times_counted(live.store, of_log["app"].user) == (1, 1)
        assert post_all(live, of_log.values()) == 0
        assert live.wal.erase_users([of_log["events"].user], 1 << 60) == 1
        assert post_all(live, [of_log["app"], of_log[None]]) == 0


def test_events_that_were_excluded_are_not_counted_if_they_are_posted(
    lake: Lake, tmp_path: Path
) -> None:
    """Features of the tables have none of the events above the cap of a user and day."""
    folder = tmp_path / "feature_store" / "first"
    lengths = HistoryLengths("behaviour", 40)
    build_feature_store(lake, folder, lake.spec.day_end(FIRST), lengths).close()
    feature_store_pointer(str(tmp_path)).promote("first")
    excluded = events_of_day(lake, FIRST, "excluded_events")
    with closing(FeatureStoreHandle(str(tmp_path), lake.spec)) as live:
        assert len(excluded) > 10 and post_all(live, excluded) == 0


def test_a_service_whose_store_was_removed_reports_it(live: FeatureStoreHandle, root: Path) -> None:
    """For example by an erasure, after which no store could be built."""
    shutil.rmtree(root / "feature_store")
    with pytest.raises(UserError, match="was removed: run `gemline rank materialize` and restart"):
        live.open_newer()


def test_posted_attributes_are_handed_over_to_a_newer_store(
    live: FeatureStoreHandle, lake: Lake, root: Path
) -> None:
    now = lake.spec.day_end(LAST) * MICROS
    live.write(
        [[WalEntry("item", now, AttributeVersion("ad-new", now, {"kind": "ad"}, 2.0, "traffic"))]]
    )
    feature_store_pointer(str(root)).promote(str(LAST))
    switch_to_live_store(live)
    with live.store.read_transaction() as txn:
        assert txn.get("bids", storage_key("ad-new"))


def test_a_log_that_was_replaced_is_applied_from_its_start(
    live: FeatureStoreHandle, lake: Lake, root: Path
) -> None:
    for number in range(3):
        post_all(live, [event_at_end_of(lake, LAST, event_id=f"{number}")])
    live.close()
    shutil.rmtree(root / "feature_store_wal")
    again = FeatureStoreHandle(str(root), lake.spec)
    assert post_all(again, [event_at_end_of(lake, LAST, event_id="after")]) == 1
    assert times_counted(again.store, "new") == (4, 4)
    again.close()


def test_an_entry_that_no_longer_fits_the_spec_is_skipped(
    live: FeatureStoreHandle, lake: Lake
) -> None:
    mismatch = event_at_end_of(lake, LAST, event_id="gone", surface="moon")
    assert post_all(live, [mismatch, event_at_end_of(lake, LAST)]) == 2
    assert times_counted(live.store, "new") == (1, 1)


def test_an_entry_that_cannot_be_applied_does_not_block_those_after_it(
    live: FeatureStoreHandle, lake: Lake
) -> None:
    received = lake.spec.day_end(LAST) * MICROS - 1
    broken = WalEntry(
        "item", received, AttributeVersion("ad-9", received, {"advertiser_id": "\ud800"})
    )
    assert live.write([[broken, wal_entry(event_at_end_of(lake, LAST))]]) == [2]
    assert times_counted(live.store, "new") == (1, 1)


def test_a_store_of_the_future_is_refused_and_the_log_is_kept(
    live: FeatureStoreHandle, lake: Lake, root: Path
) -> None:
    assert post_all(live, [event_at_end_of(lake, LAST)]) == 1
    before = wal_entries(live)
    future = lake.spec.day_end(date.today() + timedelta(days=365))
    lengths = HistoryLengths("behaviour", 40)
    build_feature_store(lake, root / "feature_store" / "future", future, lengths).close()
    feature_store_pointer(str(root)).promote("future")
    with pytest.raises(UserError, match="which is in the future: run `gemline rank materialize`"):
        live.open_newer()
    assert wal_entries(live) == before
    assert post_all(live, [event_at_end_of(lake, LAST, event_id="later")]) == 1
    assert times_counted(live.store, "new") == (2, 2)


def test_the_name_of_a_removed_store_is_not_used_again(tmp_path: Path) -> None:
    pointer = VersionPointer(tmp_path)
    for number in (2, 10):
        (tmp_path / f"{LAST:%Y%m%d}-{number}").mkdir()
    assert next_store_name(pointer, LAST) == f"{LAST:%Y%m%d}-11"
    assert next_store_name(pointer, EVE) == f"{EVE:%Y%m%d}-1"
    assert next_store_name(VersionPointer(tmp_path / "none"), EVE) == f"{EVE:%Y%m%d}-1"


def test_a_full_log_names_the_remedy_and_keeps_its_entries(
    root: Path, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (root / "feature_store" / str(EVE) / "data.mdb").stat().st_size
    monkeypatch.setattr(storage, "MAP_SIZE_BYTES", size + (1 << 19))
    live = FeatureStoreHandle(str(root), lake.spec)
    posted: list[list[str]] = []
    with pytest.raises(StorageFullError, match="is full: run `gemline rank materialize`"):
        post_until_full(live, lake, posted)
    live.close()
    monkeypatch.undo()
    live = FeatureStoreHandle(str(root), lake.spec)
    *acknowledged, last_batch = posted
    ends = [user for batch in acknowledged for user in (batch[0], batch[-1])]
    assert {times_counted(live.store, user) for user in ends} == {(1, 1)}
    assert len({times_counted(live.store, user) for user in last_batch}) == 1, "all or none"
    live.close()


def post_until_full(live: FeatureStoreHandle, lake: Lake, posted: list[list[str]]) -> None:
    """Post batches of events of users, which are added to `posted` before they are posted."""
    for number in range(1000):
        users = [f"{number}-{n}" for n in range(50)]
        posted.append(users)
        events = [event_at_end_of(lake, LAST, event_id=user, user=user) for user in users]
        post_all(live, events)


def test_reader_slots_of_killed_processes_are_released(
    live: FeatureStoreHandle, root: Path
) -> None:
    code = (
        "import lmdb, sys, time; env = lmdb.open(sys.argv[1], map_size=1 << 38)\n"
        "txn = env.begin(); print(txn.id(), flush=True); time.sleep(60)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(root / "feature_store_wal")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    assert child.stdout and child.stdout.readline()
    child.kill()
    child.wait()
    assert f"{child.pid} " in live.wal.env.readers()
    live.sync_with_wal()
    assert f"{child.pid} " not in live.wal.env.readers()


def kill_posters(root: Path, spec_path: Path, names: list[str], acknowledged: int) -> list[str]:
    """Kill processes that post events while the live store changes.

    Returns the users of the events that were acknowledged.
    """
    pointer = feature_store_pointer(str(root))
    users: list[str] = []
    with ExitStack() as stack:
        children = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.ranking.poster", spec_path, root, name],
                    cwd=ROOT, stdout=subprocess.PIPE, text=True,
                )
            )
            for name in names
        ]  # fmt: skip
        for number in range(acknowledged):
            if number % 10 == 3:
                pointer.promote(str((LAST, EVE)[number // 10 % 2]))
            for name, child in zip(names, children, strict=True):
                assert child.stdout
                users.append(f"{name}-{int(child.stdout.readline())}")
        for child in children:
            child.send_signal(signal.SIGKILL)
        for name, child in zip(names, children, strict=True):
            assert child.stdout
            users += [f"{name}-{int(line)}" for line in child.stdout if line.endswith("\n")]
    return users


def test_killed_processes_lose_no_acknowledged_event_and_count_none_twice(
    root: Path, lake: Lake, spec_path: Path
) -> None:
    acknowledged: list[str] = []
    for round_ in range(2):
        names = [f"{round_}-{number}" for number in range(2)]
        acknowledged += kill_posters(root, spec_path, names, 25)
    for day in (EVE, LAST):
        feature_store_pointer(str(root)).promote(str(day))
        live = FeatureStoreHandle(str(root), lake.spec)
        counted = {user: times_counted(live.store, user) for user in acknowledged}
        payloads = [entry.payload for _, entry in live.wal.entries_after(0)]
        logged = [payload.user for payload in payloads if isinstance(payload, Event)]
        live.close()
        assert set(counted.values()) == {(1, 1)} and len(counted) >= 100
        assert len(logged) == len(set(logged)) and set(acknowledged) <= set(logged)


def test_a_store_catches_up_with_a_log_that_was_trimmed(lake: Lake, root: Path) -> None:
    """All entries of the log were removed before the store was opened."""
    live = FeatureStoreHandle(str(root), lake.spec)
    old = (lake.spec.day_end(EVE) - 30 * DAY) * MICROS
    post_all(live, [event_at_end_of(lake, EVE, event_ts=old, ingest_ts=old)])
    live.wal.trim(live.store.final_before_ts)
    assert not wal_entries(live) and live.wal.last_entry_number() == 1
    feature_store_pointer(str(root)).promote(str(LAST))
    switch_to_live_store(live)
    assert post_all(live, [event_at_end_of(lake, LAST)]) == 1 and times_counted(
        live.store, "new"
    ) == (1, 1)
    live.close()


def test_the_log_numbers_entries_without_a_gap_across_processes(tmp_path: Path, lake: Lake) -> None:
    for number in range(3):
        wal = open_wal(tmp_path / "log")
        wal.append([[wal_entry(event_of("n", number))]], lambda _: False)
        assert [entry_number for entry_number, _ in wal.entries_after(0)] == [*range(1, number + 2)]
        wal.close()
