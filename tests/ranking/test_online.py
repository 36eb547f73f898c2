"""Online is offline: what a live request reads is what the tables say of it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from etl.errors import UserError
from etl.spec import DataSpec
from etl.tables.contracts import RESERVED_ITEMS
from etl.tables.lake import Lake
from features.counting import counts_before
from features.inputs import ITEM
from ranking.online import feed
from ranking.online.assemble import Assembler, newest
from ranking.online.attributes import Version, upsert_attributes
from ranking.online.compare import compare, differing
from ranking.online.counters import LEVELS, Counters
from ranking.online.database import Txn
from ranking.online.feed import Event, check_event, ingest_event
from ranking.online.layout import OFFER, key_of
from ranking.online.request import Asked
from ranking.online.store import REQUEST_SLACK, Meta, Store, create, open_store
from ranking.reads import Reads
from tests.conftest import FIRST, LAST
from tests.small_line import DAYS

READS = Reads(searched=40, events=12, before=6, user_rows=50)
LENGTH = 40
DELAY = 300


def test_every_request_reads_what_the_tables_say(gem_lake: Lake, tmp_path: Path) -> None:
    found = compare(gem_lake, LAST, "behaviour", READS, tmp_path / "store")
    assert found.requests > 100 and not found.differences


def test_requests_read_what_the_tables_say_of_a_log_with_a_delay(
    small_lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the comparison sees where live features ignore the delay."""
    assert small_lake.spec.delays["ad_click"] == DELAY
    reads, day = replace(READS, before=0), DAYS[1]
    found = compare(small_lake, day, "behaviour", reads, tmp_path / "store")
    assert found.requests > 50 and not found.differences
    monkeypatch.setattr(feed, "visible_ts", lambda _, event: event.ingest_ts // MICRO)
    found = compare(small_lake, day, "behaviour", reads, tmp_path / "other")
    assert any("ages" in name for name in found.differences)
    assert any("numbers" in name for name in found.differences)


MICRO = 1_000_000


def meta(spec: DataSpec) -> Meta:
    return Meta(spec=spec, sequence="behaviour", length=LENGTH)


@pytest.fixture
def store(lake: Lake, tmp_path: Path) -> Iterator[Store]:
    made = create(tmp_path / "store", meta(lake.spec))
    yield made
    made.close()


WINDOWS, CODES = (90, 3600, 5400, 86_400), (1, 2)
EVENT = st.tuples(st.integers(0, 2), st.integers(90_000, 200_000), st.integers(0, 2))
CLOSE = st.tuples(st.integers(0, 2), st.integers(180_000, 180_200), st.integers(1, 2))


@pytest.fixture(scope="module")
def counted(lake_spec: DataSpec, tmp_path_factory) -> Iterator[Store]:
    made = create(tmp_path_factory.mktemp("counters") / "store", meta(lake_spec))
    yield made
    made.close()


def cleared(store: Store, txn: Txn) -> None:
    for table, _ in LEVELS:
        for key, _ in list(txn.from_key(table, b"\0")):
            txn.delete(table, key)


AS_OF = st.integers(180_000, 180_300) | st.integers(90_000, 210_000)


@settings(max_examples=60)
@given(st.lists(EVENT | CLOSE, max_size=40), AS_OF, st.booleans())
@example([(0, 180_000 + n % 60, 1) for n in range(200)], 180_031, True)
@example([(0, 180_000 + n % 60, 1) for n in range(200)], 180_091, False)
def test_counters_are_exact_to_the_second(
    counted: Store, events: list[tuple[int, int, int]], as_of: int, at_once: bool
) -> None:
    """As the rule of the tables says, counted one by one or all at once."""
    counters, keys = Counters(WINDOWS, CODES, (("item",),)), np.arange(3)
    names = counters.names_of(0, keys[:, None])
    key, second, code = np.array(events, np.int64).reshape(-1, 3).T
    known = np.isin(code, CODES)
    with counted.writing() as txn:
        cleared(counted, txn)
        if at_once:
            type_ = (code[known] == CODES[1]).astype(np.int64)
            for table, pairs in counters.records({"item": key[known]}, second[known], type_):
                txn.put_all(table, pairs)
        else:
            for one in events:
                counters.add(txn, [names[one[0]]], one[1], one[2], one[1])
    with counted.reading() as txn:
        found = counters.count(txn, names, as_of)
    wanted = counts_before(key, second, code, keys, np.full(3, as_of), WINDOWS, CODES)
    np.testing.assert_array_equal(found, wanted)


def test_counters_are_kept_as_long_as_a_window_reaches_them(counted: Store) -> None:
    counters = Counters((3600,), (1,), (("item",),))
    name = counters.names_of(0, np.zeros((1, 1), np.int64))[0]
    now = counters.kept + 10 * 3600
    with counted.writing() as txn:
        cleared(counted, txn)
        for second in range(0, now, 1800):
            counters.add(txn, [name], second, 1, second)
    with counted.reading() as txn:
        left = {table: [k for k, _ in txn.from_key(table, b"\0")] for table, _ in LEVELS}
        hours = np.frombuffer(txn.get("hours", name), counters.row)["bucket"]
    assert hours[0] == (now - 1800 - counters.kept) // 3600
    assert len(left["minutes"]) == len(hours) and len(left["seconds"]) == 2 * len(hours)


def test_the_records_of_an_event_do_not_grow_with_the_events_of_its_hour(counted: Store) -> None:
    """What an event rewrites and a ranking reads, where all seconds of an hour have events."""
    counters = Counters.of(counted.spec)
    second, types = np.arange(7200, 10_800), len(counters.codes)
    parts = {"surface": np.ones(len(second) * types, np.int64)}
    with counted.writing() as txn:
        cleared(counted, txn)
        for table, pairs in counters.records(
            parts, np.repeat(second, types), np.tile(np.arange(types), len(second))
        ):
            txn.put_all(table, pairs)
            assert max(len(value) for _, value in pairs) <= 60 * counters.row.itemsize


def ingested(store: Store, *events: Event) -> None:
    with store.writing() as txn:
        for one in events:
            ingest_event(store, txn, one)


def test_an_event_is_visible_after_the_delay_of_its_log(
    lake_spec: DataSpec, lake: Lake, tmp_path: Path
) -> None:
    """The largest delay of the logs that declare its type; of other types it is seen at once."""
    told = lake_spec.model_dump()
    columns = told["sources"]["events"]["columns"] | {"type": None}
    clicks = told["sources"]["events"] | {"columns": columns, "event": "ad_click", "delay": "1h"}
    spec = DataSpec.model_validate(told | {"sources": told["sources"] | {"clicks": clicks}})
    store = create(tmp_path / "store", meta(spec))
    clicked, viewed = event(lake), event(lake, event_id="e2", user="u2", type="ad_view")
    ingested(store, clicked, viewed)
    now = clicked.ingest_ts // MICRO
    for user, delay in (("u1", 3600), ("u2", 0)):
        for as_of, ages in ((now + delay, [0]), (now + delay + 1, [1])):
            asked = Asked(user, "feed", as_of, ["a1"], {})
            assert Assembler(store, READS)(asked).requests.ages.tolist() == [ages]
    store.close()


def test_a_history_keeps_what_is_visible_beside_what_is_not_yet(
    lake_spec: DataSpec, lake: Lake, tmp_path: Path
) -> None:
    """However many events of a delayed log come, a request reads all the events that it can."""
    told = lake_spec.model_dump()
    told["sources"]["events"]["delay"] = "1d"
    store = create(tmp_path / "store", meta(DataSpec.model_validate(told)))
    first = event(lake).ingest_ts
    for number in range(2 * LENGTH):
        ingested(store, event(lake, event_id=f"old-{number}"))
    later = first + 86_400 * MICRO + MICRO
    for number in range(10 * LENGTH):
        new = event(lake, event_id=f"new-{number}", event_ts=later, ingest_ts=later)
        ingested(store, new)
    with store.reading() as txn:
        stored = txn.get("history", b"u1")
    assert len(store.histories.seen(stored, later // MICRO + 1)) == LENGTH
    store.close()


VERSION = st.tuples(st.integers(0, 60), st.integers(-5, 60))  # hours: since now, valid from


@settings(max_examples=30)
@given(st.lists(VERSION, min_size=1, max_size=30), st.integers(0, 24))
def test_a_request_reads_the_newest_version_before_it_though_old_ones_are_dropped(
    counted: Store, versions: list[tuple[int, int]], later: int
) -> None:
    hour = 3600
    versions = sorted(versions, key=lambda one: one[0])
    with counted.writing() as txn:
        txn.delete("offers", b"a")
        for number, (now, since) in enumerate(versions):
            version = Version("a", since * hour * MICRO, {}, float(number), "traffic")
            upsert_attributes(counted, txn, "item", version, now * hour)
    as_of = versions[-1][0] * hour - REQUEST_SLACK + later * hour
    known = {since * hour: number for number, (_, since) in enumerate(versions)}
    wanted = max((since for since in known if since < as_of), default=None)
    with counted.reading() as txn:
        stored = txn.get("offers", b"a")
    rows = np.frombuffer(stored, OFFER)
    found = newest([stored], OFFER, as_of)["bid"][0]
    assert found == (0 if wanted is None else known[wanted])
    assert (rows["since"] < (versions[-1][0] * hour - REQUEST_SLACK) * MICRO).sum() <= 1


def event(lake: Lake, **changes: object) -> Event:
    now = lake.spec.day_end(FIRST) * 1_000_000
    told = {
        "event_id": "e1", "user": "u1", "item": "a1", "surface": "feed", "type": "ad_click",
        "event_ts": now, "ingest_ts": now,
    }  # fmt: skip
    return Event(**(told | changes))


def test_the_first_item_of_an_empty_store_gets_the_first_index(store: Store) -> None:
    with store.writing() as txn:
        for name in ("first", "second"):
            upsert_attributes(store, txn, "item", Version(name, 0, {}), 0)
    with store.reading() as txn:
        heads = [
            np.frombuffer(txn.get("items", key_of(name)), store.layout.item_head)
            for name in ("first", "second")
        ]
    assert [int(head["index"][0]) for head in heads] == [RESERVED_ITEMS, RESERVED_ITEMS + 1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"surface": "moon"}, "unknown surface 'moon'; known: feed"),
        ({"type": "yawn"}, "unknown event type 'yawn'"),
        ({"user": ""}, "needs a user"),
        ({"event_ts": 0}, "before 2000"),
        ({"dwell_ms": float("nan")}, "a dwell of nan"),
    ],
)
def test_a_bad_event_is_named(lake: Lake, changes: dict, said: str) -> None:
    check_event(lake.spec, event(lake))
    with pytest.raises(UserError, match=said):
        check_event(lake.spec, event(lake, **changes))


def test_a_store_of_another_spec_or_of_nothing_is_refused(lake: Lake, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="run `gemline rank store` first"):
        open_store(tmp_path / "nowhere", lake.spec)
    create(tmp_path / "store", meta(lake.spec)).close()
    other = DataSpec.model_validate(lake.spec.model_dump() | {"lateness": "1h"})
    with pytest.raises(UserError, match="run `gemline rank store` again"):
        open_store(tmp_path / "store", other)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"surface": "moon"}, "no ads on surface 'moon'"),
        ({"candidates": []}, "without candidates"),
        ({"candidates": ["a"] * 100_000}, "100,000 candidates"),
        ({"context": {"colour": "red"}}, "has no colour; it has .*position"),
        ({"context": {"device": 3}}, "device of the context is 3; it is a string"),
        ({"context": {"position": "first"}}, "it is a number"),
        ({"context": [{}, {}]}, "a context for each candidate"),
    ],
)
def test_what_cannot_be_ranked_is_named(store: Store, changes: dict, said: str) -> None:
    told = {"user": "u1", "surface": "feed", "as_of": 10**9, "candidates": ["a"], "context": {}}
    with pytest.raises(UserError, match=said):
        Assembler(store, READS)(Asked(**(told | changes)))


def test_what_is_read_otherwise_is_named(store: Store) -> None:
    live = Assembler(store, READS)(Asked("nobody", "feed", 10**9, ["x", "y"], {}))
    known = np.ones(RESERVED_ITEMS + 1, bool)
    assert not list(differing(live.requests, live.requests, known))
    for name in ("types", "surfaces", "dwells", "ages"):
        other = replace(live.requests, **{name: getattr(live.requests, name) + 1})
        assert list(differing(other, live.requests, known)) == [name]
    last = tuple(replace(rhythm, last=rhythm.last + 1) for rhythm in live.candidates.rhythms)
    other = replace(live.candidates, rhythms=last)
    assert "rhythms.0.last" in differing(other, live.candidates, known)
    items = replace(
        live.candidates.items,
        ids=live.candidates.items.ids | {ITEM: np.full((1, 2), RESERVED_ITEMS)},
    )
    moved = replace(live.candidates, items=items)
    assert list(differing(moved, live.candidates, known)) == [f"items.ids.{ITEM}"]
    assert not list(differing(moved, live.candidates, known[:-1]))


def test_a_user_and_items_never_seen_are_read_as_unknown(store: Store) -> None:
    live = Assembler(store, READS)(Asked("nobody", "feed", 10**9, ["x", "y"], {}))
    assert (live.requests.ages == 0).all() and (live.candidates.items.ids[ITEM] == 0).all()
    assert live.bids.tolist() == [0.0, 0.0] and live.goals == [None, None]
    assert not live.known.any()
