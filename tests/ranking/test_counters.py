"""Windowed counters: exact to the second, with records of bounded size."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from etl.spec import DataSpec
from features.counters import windowed_counts_before
from ranking.feature_store.counters import COUNTER_LEVELS, Counters
from ranking.feature_store.storage import Txn
from ranking.feature_store.store import (
    FeatureStore,
    StoreMetadata,
    create_store,
)

WINDOWS, CODES = (90, 3600, 5400, 86_400), (1, 2)
EVENT = st.tuples(st.integers(0, 2), st.integers(90_000, 200_000), st.integers(0, 2))
NEARBY_EVENT = st.tuples(st.integers(0, 2), st.integers(180_000, 180_200), st.integers(1, 2))


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


AS_OF = st.integers(180_000, 180_300) | st.integers(90_000, 210_000)


@settings(max_examples=60)
@given(st.lists(EVENT | NEARBY_EVENT, max_size=40), AS_OF, st.booleans())
@example([(0, 180_000 + n % 60, 1) for n in range(200)], 180_031, True)
@example([(0, 180_000 + n % 60, 1) for n in range(200)], 180_091, False)
def test_counters_are_exact_to_the_second(
    shared_store: FeatureStore, events: list[tuple[int, int, int]], as_of: int, at_once: bool
) -> None:
    """As in the tables, whether events are counted one by one or all at once."""
    counters, keys = Counters(WINDOWS, CODES, (("item",),)), np.arange(3)
    record_keys = counters.encode_record_keys(0, keys[:, None])
    key, second, code = np.array(events, np.int64).reshape(-1, 3).T
    is_counted = np.isin(code, CODES)
    with shared_store.write_transaction() as txn:
        clear_counters(shared_store, txn)
        if at_once:
            type_index = (code[is_counted] == CODES[1]).astype(np.int64)
            for table, pairs in counters.build_records(
                {"item": key[is_counted]}, second[is_counted], type_index
            ):
                txn.put_many(table, pairs)
        else:
            for item, time, event_code in events:
                counters.increment(txn, [record_keys[item]], time, event_code, time)
    with shared_store.read_transaction() as txn:
        counts = counters.window_counts(txn, record_keys, as_of)
    expected = windowed_counts_before(key, second, code, keys, np.full(3, as_of), WINDOWS, CODES)
    np.testing.assert_array_equal(counts, expected)


def test_counters_are_kept_as_long_as_a_window_reaches_them(shared_store: FeatureStore) -> None:
    counters = Counters((3600,), (1,), (("item",),))
    record_key = counters.encode_record_keys(0, np.zeros((1, 1), np.int64))[0]
    now = counters.retention_seconds + 10 * 3600
    with shared_store.write_transaction() as txn:
        clear_counters(shared_store, txn)
        for second in range(0, now, 1800):
            counters.increment(txn, [record_key], second, 1, second)
    with shared_store.read_transaction() as txn:
        remaining = {
            table: [k for k, _ in txn.iterate_from(table, b"\0")] for table, _ in COUNTER_LEVELS
        }
        hours = np.frombuffer(txn.get("hours", record_key), counters.row_dtype)["bucket"]
    assert hours[0] == (now - 1800 - counters.retention_seconds) // 3600
    assert len(remaining["minutes"]) == len(hours) and len(remaining["seconds"]) == 2 * len(hours)


def test_the_records_of_an_event_do_not_grow_with_the_events_of_its_hour(
    shared_store: FeatureStore,
) -> None:
    """The size of each record, with events in every second of an hour."""
    counters = Counters.from_spec(shared_store.spec)
    seconds, num_types = np.arange(7200, 10_800), len(counters.event_codes)
    key_values = {"surface": np.ones(len(seconds) * num_types, np.int64)}
    with shared_store.write_transaction() as txn:
        clear_counters(shared_store, txn)
        for table, pairs in counters.build_records(
            key_values,
            np.repeat(seconds, num_types),
            np.tile(np.arange(num_types), len(seconds)),
        ):
            txn.put_many(table, pairs)
            assert max(len(value) for _, value in pairs) <= 60 * counters.row_dtype.itemsize
