"""A process that posts events until it is killed: `python -m tests.ranking.poster SPEC LAKE NAME`.

It prints the number of each acknowledged event, and switches to the live store as it moves.
"""

import itertools
import sys
import time
from pathlib import Path

import numpy as np

from etl.spec import load_spec
from features.encoding.scalar import spark_xxhash64
from ranking.feature_store.counter_rows import COUNTER_LEVELS
from ranking.feature_store.events import Event
from ranking.feature_store.store import FeatureStore
from ranking.feature_store.wal import FeatureStoreHandle, WalEntry


def event_of(name: str, number: int) -> Event:
    """An event at the current time, by a new user."""
    now, user = time.time_ns() // 1000, f"{name}-{number}"
    return Event(f"event-{user}", user, "ad-1", "feed", "ad_click", now, now)


def post(handle: FeatureStoreHandle, event: Event) -> int:
    """Post an event and return how many were new: one or none."""
    return handle.write([[WalEntry("event", event.ingest_ts, event)]])[0]


def switch_to_live_store(handle: FeatureStoreHandle) -> None:
    """Switch to the store that the pointer names, and apply the log."""
    newer = handle.open_newer()
    if newer:
        handle.handover(newer).close()
    handle.sync_with_wal()


def times_counted(store: FeatureStore, user: str) -> tuple[int, int]:
    """The numbers of a user's events in the history, and in the counters of all retained hours."""
    with store.read_transaction() as txn:
        history = store.histories.visible_events(txn, user.encode(), 1 << 40)
    key_index = store.counters.key_columns.index(("user",))
    [record_key] = store.counters.encode_record_keys(key_index, np.array([[spark_xxhash64(user)]]))
    with store.read_transaction() as txn:
        hours_dtype = store.counters.layout.dtype(COUNTER_LEVELS[0])
        rows = np.frombuffer(txn.get("hours", record_key), hours_dtype)
    return len(history), int(rows["counts"].sum())


def main(spec: str, lake: str, name: str) -> None:
    handle = FeatureStoreHandle(lake, load_spec(Path(spec)))
    for number in itertools.count():
        post(handle, event_of(name, number))
        print(number, flush=True)
        if number % 5 == 4:
            switch_to_live_store(handle)


if __name__ == "__main__":
    main(*sys.argv[1:])
