"""What is posted live: once acknowledged it is in every store, whatever is killed meanwhile."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from etl.spec.units import DAY
from etl.tables import arrow, contracts
from etl.tables.lake import Lake
from ranking.online import database
from ranking.online.attributes import Version
from ranking.online.build import build
from ranking.online.database import StorageFullError
from ranking.online.feed import Event, ingest_event
from ranking.online.layout import key_of
from ranking.online.live import Live, stores
from ranking.online.log import WalEntry, open_log
from ranking.online.store import Store, open_store
from tests.conftest import FIRST, LAST, ROOT
from tests.ranking.poster import event_of, follow, times_counted

EVE = LAST - timedelta(days=1)
MICROS = 1_000_000


@pytest.fixture(scope="module")
def built(lake: Lake, tmp_path_factory) -> Path:
    """Stores of the eve, of the last day, and of days after it on which nothing landed."""
    root = tmp_path_factory.mktemp("stores")
    for days in range(-1, 4):
        day = LAST + timedelta(days=days)
        build(lake, root / f"{day}", day, "behaviour", 40, 0).close()
    return root


@pytest.fixture
def root(built: Path, tmp_path: Path) -> Path:
    """A lake of stores alone, of which the one of the eve answers."""
    place = tmp_path / "lake"
    shutil.copytree(built, place / "online")
    stores(str(place)).swap(str(EVE))
    return place


@pytest.fixture
def live(root: Path, lake: Lake) -> Iterator[Live]:
    found = Live(str(root), lake.spec)
    yield found
    found.close()


def day_of(lake: Lake, day) -> list[Event]:
    """Events that landed on a day, as they would have been posted."""
    spec = lake.spec
    surfaces = {code: name for name, code in spec.surface_codes.items()}
    types = {code: name for name, code in spec.event_codes.items()}
    rows = arrow.snapshot(lake, contracts.events(spec)).read(day=day).sort_by("ingest_ts")
    return [
        Event(
            row["event_id"], row["user_id"], row["item_id"], surfaces[row["surface"]],
            types[row["type"]], row["event_ts"], row["ingest_ts"], row["dwell_ms"],
        )
        for row in rows.to_pylist()
    ]  # fmt: skip


def posted(live: Live, events: Iterable[Event]) -> int:
    return live.write([[WalEntry("event", one.ingest_ts, one) for one in events]])[0]


def at(lake: Lake, day, **changes: object) -> Event:
    """An event at the end of a day."""
    now = lake.spec.day_end(day) * MICROS - 1
    return replace(Event("posted", "new", "ad-1", "feed", "ad_click", now, now), **changes)


def content(store: Store, table: str) -> dict[bytes, bytes]:
    with store.reading() as txn:
        return dict(txn.from_key(table, b"\0"))


def test_an_event_posted_again_is_not_new(live: Live, lake: Lake) -> None:
    event = at(lake, LAST)
    assert live.write([[entry(event), entry(event)], [entry(event)]]) == [1, 0]
    assert posted(live, [event]) == 0 and times_counted(live.store, "new") == (1, 1)


def entry(event: Event) -> WalEntry:
    return WalEntry("event", event.ingest_ts, event)


def test_a_newer_store_has_what_was_posted_and_counts_it_once(
    live: Live, lake: Lake, root: Path, built: Path
) -> None:
    """Events of the last day, posted, then in the tables: the same as in the tables alone."""
    assert posted(live, day_of(lake, LAST)) > 100
    assert posted(live, [at(lake, LAST, event_id="later")]) == 1
    stores(str(root)).swap(str(LAST))
    follow(live)
    assert live.store.folder.name == str(LAST)
    plain = pristine(built, root, lake)
    with plain.writing() as txn:
        ingest_event(plain, txn, at(lake, LAST, event_id="later"))
    same_behaviour(live.store, plain)


def pristine(built: Path, root: Path, lake: Lake) -> Store:
    """The store of the last day, as it was built."""
    shutil.copytree(built / str(LAST), root / "pristine")
    return open_store(root / "pristine", lake.spec)


def same_behaviour(store: Store, other: Store) -> None:
    for table in ("history", "hours", "minutes", "seconds"):
        assert content(store, table) == content(other, table), table
    other.close()


def test_what_was_posted_before_a_restart_is_in_a_store_that_came_meanwhile(
    root: Path, lake: Lake
) -> None:
    before = Live(str(root), lake.spec)
    posted(before, [at(lake, LAST)])
    before.close()
    stores(str(root)).swap(str(LAST))
    after = Live(str(root), lake.spec)
    assert times_counted(after.store, "new") == (1, 1)
    after.close()


def test_a_clock_that_goes_back_loses_nothing(live: Live, lake: Lake, root: Path) -> None:
    now = lake.spec.day_end(LAST) * MICROS
    for number in range(5):
        earlier = now - number * 3600 * MICROS
        event = at(lake, LAST, event_id=f"{number}", event_ts=earlier, ingest_ts=earlier)
        assert posted(live, [event]) == 1
    stores(str(root)).swap(str(LAST))
    follow(live)
    assert times_counted(live.store, "new") == (5, 5)


def test_an_event_whose_log_does_not_come_stays_as_long_as_it_may_come(
    live: Live, lake: Lake, root: Path
) -> None:
    """From store to store, until the tables are final for its time; the log forgets it then."""
    posted(live, [at(lake, EVE)])
    counted = {}
    for days in range(-1, 4):
        stores(str(root)).swap(str(LAST + timedelta(days=days)))
        follow(live)
        counted[days] = times_counted(live.store, "new")[0], len(content_of_log(live))
    kept = lake.spec.lateness_days  # days after the one on which it would have landed
    assert counted == {days: (1, 1) if days <= kept else (0, 0) for days in counted}


def content_of_log(live: Live) -> list:
    return list(live.log.after(0))


def test_what_the_tables_have_counts_once_however_late_it_was_posted(
    live: Live, lake: Lake, root: Path, built: Path
) -> None:
    """All events were posted as late as the spec allows, to a store that knew none of them."""
    wait = lake.spec.lateness * MICROS
    for day in range((LAST - FIRST).days + 1):
        events = day_of(lake, FIRST + timedelta(days=day))
        late = [entry(replace(one, ingest_ts=one.event_ts + wait)) for one in events]
        assert live.log.append([late], lambda _: False) == [len(late)]
    stores(str(root)).swap(str(LAST))
    follow(live)
    same_behaviour(live.store, pristine(built, root, lake))


def test_versions_are_handed_over_too(live: Live, lake: Lake, root: Path) -> None:
    now = lake.spec.day_end(LAST) * MICROS
    live.write([[WalEntry("item", now, Version("ad-new", now, {"kind": "ad"}, 2.0, "traffic"))]])
    stores(str(root)).swap(str(LAST))
    follow(live)
    with live.store.reading() as txn:
        assert txn.get("offers", key_of("ad-new"))


def test_a_log_that_was_begun_anew_is_read_from_its_start(
    live: Live, lake: Lake, root: Path
) -> None:
    for number in range(3):
        posted(live, [at(lake, LAST, event_id=f"{number}")])
    live.close()
    shutil.rmtree(root / "online_log")
    again = Live(str(root), lake.spec)
    assert posted(again, [at(lake, LAST, event_id="after")]) == 1
    assert times_counted(again.store, "new") == (4, 4)
    again.close()


def test_an_entry_that_the_spec_no_longer_allows_does_not_stop_the_others(
    live: Live, lake: Lake
) -> None:
    gone = at(lake, LAST, event_id="gone", surface="moon")
    assert posted(live, [gone, at(lake, LAST)]) == 2
    assert times_counted(live.store, "new") == (1, 1)


def test_a_full_log_says_what_to_do_and_keeps_what_it_has(
    root: Path, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (root / "online" / str(EVE) / "data.mdb").stat().st_size
    monkeypatch.setattr(database, "MAP_BYTES", size + (1 << 19))
    live = Live(str(root), lake.spec)
    with pytest.raises(StorageFullError, match="is full: run `gemline rank store`"):
        for number in range(1000):
            names = [f"{number}-{n}" for n in range(50)]
            posted(live, [at(lake, LAST, event_id=name, user=name) for name in names])
    live.close()
    monkeypatch.undo()
    live = Live(str(root), lake.spec)
    done = [f"{one}-{n}" for one in range(number) for n in (0, 49)]
    assert {times_counted(live.store, name) for name in done} == {(1, 1)}
    assert len({times_counted(live.store, name) for name in names}) == 1, "all or none"
    live.close()


def test_readers_of_killed_processes_are_cleared(live: Live, root: Path) -> None:
    code = (
        "import lmdb, sys, time; env = lmdb.open(sys.argv[1], map_size=1 << 38)\n"
        "txn = env.begin(); print(txn.id(), flush=True); time.sleep(60)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(root / "online_log")], cwd=ROOT, stdout=subprocess.PIPE
    )
    assert child.stdout and child.stdout.readline()
    child.kill()
    child.wait()
    assert f"{child.pid} " in live.log.env.readers()
    live.keep_up()
    assert f"{child.pid} " not in live.log.env.readers()


def kill_posters(root: Path, spec_path: Path, names: list[str], acknowledged: int) -> list[str]:
    """Users of the events that processes had acknowledged when they were killed.

    The pointer moves while they post.
    """
    pointer, found = stores(str(root)), []
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
                pointer.swap(str((LAST, EVE)[number // 10 % 2]))
            for name, child in zip(names, children, strict=True):
                found.append(f"{name}-{int(child.stdout.readline())}")
        for child in children:
            child.send_signal(signal.SIGKILL)
        for name, child in zip(names, children, strict=True):
            found += [f"{name}-{int(line)}" for line in child.stdout if line.endswith("\n")]
    return found


def test_killed_processes_lose_no_acknowledged_event_and_count_none_twice(
    root: Path, lake: Lake, spec_path: Path
) -> None:
    acknowledged = []
    for round_ in range(2):
        names = [f"{round_}-{number}" for number in range(2)]
        acknowledged += kill_posters(root, spec_path, names, 25)
    for day in (EVE, LAST):
        stores(str(root)).swap(str(day))
        live = Live(str(root), lake.spec)
        counted = {user: times_counted(live.store, user) for user in acknowledged}
        logged = [one.content.user for _, one in live.log.after(0)]
        live.close()
        assert set(counted.values()) == {(1, 1)} and len(counted) >= 100
        assert len(logged) == len(set(logged)) and set(acknowledged) <= set(logged)


def test_a_store_catches_up_over_what_was_trimmed(lake: Lake, root: Path) -> None:
    """All that the log had was settled before a store was opened: nothing is waited for."""
    live = Live(str(root), lake.spec)
    old = (lake.spec.day_end(EVE) - 30 * DAY) * MICROS
    posted(live, [at(lake, EVE, event_ts=old, ingest_ts=old)])
    live.log.trim(live.store.settled_ts)
    assert not content_of_log(live) and live.log.last() == 1
    stores(str(root)).swap(str(LAST))
    follow(live)
    assert posted(live, [at(lake, LAST)]) == 1 and times_counted(live.store, "new") == (1, 1)
    live.close()


def test_the_log_numbers_entries_without_a_gap_across_processes(tmp_path: Path, lake: Lake) -> None:
    for number in range(3):
        wal = open_log(tmp_path / "log")
        wal.append([[entry(event_of("n", number))]], lambda _: False)
        assert [found for found, _ in wal.after(0)] == [*range(1, number + 2)]
        wal.close()
