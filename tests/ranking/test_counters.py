"""Live counters equal those of the tables, to the second, with records of bounded size."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from etl.array_types import Float64, Int64
from etl.spec import DataSpec
from etl.spec.counters import FUNCTIONS
from features.counters.aggregations import (
    Aggregations,
    DistinctCount,
    EventRows,
    NumericAggregation,
)
from features.counters.distinct_counts import MISSING_ENTRY, entries_of
from features.counters.numeric_columns import MISSING
from ranking.feature_store.counter_rows import COUNTER_LEVELS, CountedEvents
from ranking.feature_store.counters import Counters
from ranking.feature_store.storage import Txn
from ranking.feature_store.store import (
    FeatureStore,
    StoreMetadata,
    create_store,
)

DAY = 86_400
# Type 3 is only timed, type 4 has only functions of numbers, type 5 changes nothing.
AGGREGATIONS = Aggregations(
    windows=(3600, 90, DAY, 5400),
    count_types=(1, 2),
    half_lives=(1, 3600, 100 * DAY),
    last_types=(3, 2),
    numeric=(
        NumericAggregation("mean", "dwell", 1),
        *(NumericAggregation(function, "value", 4) for function in FUNCTIONS),
        NumericAggregation("last", "dwell", 4),
        NumericAggregation("first", "value", 1),
        NumericAggregation("min", "value", 2),
    ),
    distinct=(DistinctCount("item", 4), DistinctCount("user", 1), DistinctCount("item", 2)),
)
COLUMNS: tuple[str, ...] = ("dwell", "value")
# Key, second, type, dwell and value in fixed point, entries of the item and the user.
Event = tuple[int, int, int, int, int, int, int]
ENTRIES = st.sampled_from([MISSING_ENTRY, *entries_of(np.arange(40)).tolist()])
TYPES = st.integers(1, 5)
DWELLS = st.just(MISSING) | st.integers(0, DAY * 1000)
VALUES = st.just(MISSING) | st.integers(-3, 3) | st.sampled_from((-(10**13), 2**62))
COLUMN_VALUES = (TYPES, DWELLS, VALUES, ENTRIES, ENTRIES)
EVENT = st.tuples(st.integers(0, 2), st.integers(90_000, 200_000), *COLUMN_VALUES)
NEARBY_EVENT = st.tuples(st.integers(0, 2), st.integers(180_000, 180_200), *COLUMN_VALUES)


@pytest.fixture(scope="module")
def shared_store(
    lake_spec: DataSpec, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FeatureStore]:
    """A store for all examples of a property; each example clears what it uses."""
    store = create_store(
        tmp_path_factory.mktemp("counters") / "store",
        StoreMetadata(spec=lake_spec, sequence="behaviour", history_length=1),
    )
    yield store
    store.close()


def clear_counters(store: FeatureStore, txn: Txn) -> None:
    for table, _ in COUNTER_LEVELS:
        for key, _ in list(txn.iterate_from(table, b"\0")):
            txn.delete(table, key)


def counted_events(events: list[Event]) -> tuple[Int64, CountedEvents]:
    """The keys (N) of events, and the events (N)."""
    key, second, type_, *columns = np.array(events, np.int64).reshape(-1, 7).T
    dwell, value, item, user = columns
    numbers: dict[str, Int64] = {"dwell": dwell, "value": value}
    return key, CountedEvents(second, type_, numbers, {"item": item, "user": user})


def offline_values(events: list[Event], as_of: int) -> Float64:
    """The counters of keys 0 to 2 as the tables have them."""
    key, counted = counted_events(events)
    events_of_keys = EventRows.of_events(
        key, counted.epoch_seconds, counted.types, counted.numbers, counted.entries
    )
    return AGGREGATIONS.values(events_of_keys, np.arange(3), np.full(3, as_of))


AS_OF = st.integers(180_000, 180_300) | st.integers(90_000, 210_000)


@settings(max_examples=100)
@given(st.lists(EVENT | NEARBY_EVENT, max_size=40), AS_OF, st.booleans())
@example([(0, 180_000 + n % 60, 1, 1000, n, 1 + n, 64 * n) for n in range(127)], 180_031, True)
@example([(0, 180_000 + n % 60, 4, MISSING, -n, 64 * n, 0) for n in range(127)], 180_091, False)
@example(
    [(0, 180_000, 3, *[MISSING] * 2, 0, 0), (0, 180_000 - DAY, 2, 1, 1, 5, 5)], 180_000 + DAY, False
)
@example([(0, 180_000, 4, 5, 7, 9, 9), (0, 180_001, 4, MISSING, MISSING, 0, 0)], 180_002, True)
def test_counters_equal_those_of_the_tables(
    shared_store: FeatureStore, events: list[Event], as_of: int, at_once: bool
) -> None:
    """Whether events are counted one by one, in any order, or all at once."""
    counters, keys = Counters(AGGREGATIONS, (("item",),)), np.arange(3)
    record_keys = counters.encode_record_keys(0, keys[:, None])
    key, counted = counted_events(events)
    with shared_store.write_transaction() as txn:
        clear_counters(shared_store, txn)
        if at_once:
            for table, pairs in counters.build_records({"item": key}, counted):
                txn.put_many(table, pairs)
        else:
            for row, (item, time, *_) in enumerate(events):
                event = counted[np.arange(len(key)) == row]
                counters.increment(txn, [record_keys[item]], event, time)
    with shared_store.read_transaction() as txn:
        values = counters.values(txn, [*record_keys, None], as_of)
        unknown = counters.values(txn, [None, None], as_of)
    expected = offline_values(events, as_of)
    num_counts = len(AGGREGATIONS.windows) * 2
    is_decayed = np.zeros(expected.shape[1], bool)
    is_decayed[num_counts : num_counts + len(AGGREGATIONS.half_lives) * 2] = True
    np.testing.assert_array_equal(values[:3, ~is_decayed], expected[:, ~is_decayed])
    np.testing.assert_allclose(
        values[:3, is_decayed], expected[:, is_decayed], rtol=1e-9, atol=1e-300
    )
    without_events = offline_values([], as_of)
    for row in (values[3], *unknown):
        np.testing.assert_array_equal(row, without_events[0])


def test_counters_are_kept_as_long_as_a_window_reaches_them(shared_store: FeatureStore) -> None:
    numeric = (NumericAggregation("first", "value", 1),)
    counters = Counters(Aggregations((3600,), (1,), (60,), (1,), numeric), (("item",),))
    record_key = counters.encode_record_keys(0, np.zeros((1, 1), np.int64))[0]
    now = counters.retention_seconds + 10 * 3600
    with shared_store.write_transaction() as txn:
        clear_counters(shared_store, txn)
        for second in range(0, now, 1800):
            event = CountedEvents(
                np.array([second]), np.array([1]), {"value": np.array([second])}, {}
            )
            counters.increment(txn, [record_key], event, second)
    with shared_store.read_transaction() as txn:
        remaining = {
            table: [k for k, _ in txn.iterate_from(table, b"\0")] for table, _ in COUNTER_LEVELS
        }
        hours_dtype = counters.layout.dtype(COUNTER_LEVELS[0])
        hours = np.frombuffer(txn.get("hours", record_key), hours_dtype)["bucket"]
    assert hours[0] == (now - 1800 - counters.retention_seconds) // 3600
    assert len(remaining["minutes"]) == len(hours) and len(remaining["seconds"]) == 2 * len(hours)


def test_the_records_of_an_event_do_not_grow_with_the_events_of_its_hour(
    shared_store: FeatureStore,
) -> None:
    """The size of each record, with events in every second of an hour."""
    counters = Counters(AGGREGATIONS, (("surface",),))
    types = np.array(sorted(counters.layout.event_types))
    seconds = np.repeat(np.arange(7200, 10_800), len(types))
    numbers = dict.fromkeys(COLUMNS, seconds)
    entries = dict.fromkeys(("item", "user"), entries_of(seconds))
    events = CountedEvents(seconds, np.resize(types, len(seconds)), numbers, entries)
    sizes = {level.table: counters.layout.dtype(level).itemsize for level in COUNTER_LEVELS}
    with shared_store.write_transaction() as txn:
        clear_counters(shared_store, txn)
        for table, pairs in counters.build_records({"surface": np.ones_like(seconds)}, events):
            txn.put_many(table, pairs)
            assert max(len(value) for _, value in pairs) <= 60 * sizes[table]
