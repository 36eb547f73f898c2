"""Online is offline: what a live request reads is what the tables say of it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.errors import UserError
from etl.spec import DataSpec
from etl.tables.contracts import RESERVED_ITEMS
from etl.tables.lake import Lake
from features.counting import counts_before
from features.inputs import ITEM
from ranking.online.assemble import Assembler
from ranking.online.attributes import Version, tell_items
from ranking.online.compare import compare, differing
from ranking.online.counters import Counters
from ranking.online.feed import Event, feed
from ranking.online.layout import Layout, key_of
from ranking.online.request import Asked
from ranking.online.store import Meta, Store, create, open_store
from ranking.reads import Reads
from tests.conftest import FIRST, LAST

READS = Reads(searched=40, events=12, before=0, user_rows=50)
LENGTH = 40


def test_every_request_reads_what_the_tables_say(lake: Lake, tmp_path: Path) -> None:
    found = compare(lake, LAST, "behaviour", READS, tmp_path / "store")
    assert found.requests > 100 and not found.differences


def meta(spec: DataSpec) -> Meta:
    return Meta(spec=spec, sequence="behaviour", length=LENGTH)


@pytest.fixture
def store(lake: Lake, tmp_path: Path) -> Iterator[Store]:
    made = create(tmp_path / "store", meta(lake.spec))
    yield made
    made.close()


EVENT = st.tuples(st.integers(0, 2), st.integers(90_000, 200_000), st.integers(0, 2))


@settings(max_examples=20)
@given(st.lists(EVENT, max_size=25), st.integers(90_000, 210_000))
def test_counters_are_exact_to_the_second(
    tmp_path_factory, lake_spec, events: list[tuple[int, int, int]], as_of: int
) -> None:
    windows, codes = (3600, 5400, 86_400), (1, 2)
    layout = Layout.of(lake_spec)
    totals = np.dtype([("hour", "<i4"), ("counts", "<u4", (2,))])
    counters = Counters(windows, codes, (("item",),), totals)
    made = create(tmp_path_factory.mktemp("c") / "store", meta(lake_spec))
    keys = np.arange(3)
    names = counters.names_of(0, keys[:, None])
    with made.writing() as txn:
        for key, second, code in events:
            counters.add(txn.counted, [names[key]], second, code)
    with made.reading() as txn:
        found = counters.count(txn.counted, names, as_of)
    made.close()
    key, second, code = np.array(events, np.int64).reshape(-1, 3).T
    wanted = counts_before(key, second, code, keys, np.full(3, as_of), windows, codes)
    np.testing.assert_array_equal(found, wanted)
    assert layout.totals != totals


def event(lake: Lake, **changes: object) -> Event:
    now = lake.spec.day_end(FIRST) * 1_000_000
    told = {
        "event_id": "e1", "user": "u1", "item": "a1", "surface": "feed", "type": "ad_click",
        "event_ts": now, "ingest_ts": now,
    }  # fmt: skip
    return Event(**(told | changes))


def seen(store: Store, user: str) -> int:
    with store.reading() as txn:
        return len(store.histories.seen(txn.get("history", user.encode()), 1 << 40))


def test_the_first_item_of_an_empty_store_gets_the_first_index(store: Store) -> None:
    tell_items(store, [Version("first", 0, {}), Version("second", 0, {})])
    with store.reading() as txn:
        heads = [
            np.frombuffer(txn.get("items", key_of(name)), store.layout.item_head)
            for name in ("first", "second")
        ]
    assert [int(head["index"][0]) for head in heads] == [RESERVED_ITEMS, RESERVED_ITEMS + 1]


def test_an_event_counts_once(store: Store, lake: Lake) -> None:
    assert feed(store, [event(lake), event(lake)]) == 1
    assert feed(store, [event(lake)]) == 0 and seen(store, "u1") == 1


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
def test_a_bad_event_is_named_and_none_of_its_company_is_taken(
    store: Store, lake: Lake, changes: dict, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        feed(store, [event(lake), event(lake, event_id="e2", **changes)])
    assert seen(store, "u1") == 0


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
        ({"context": {"colour": "red"}}, "has no colour; it has position"),
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
