"""A process that posts events until it is killed: `python -m tests.ranking.poster SPEC LAKE NAME`.

It prints the number of each event that is acknowledged, and follows the pointer of the stores.
"""

import itertools
import sys
import time
from pathlib import Path

import numpy as np

from etl.spec import load_spec
from features.encoded import signed_hash
from ranking.online.feed import Event
from ranking.online.live import Live
from ranking.online.log import WalEntry
from ranking.online.store import Store


def event_of(name: str, number: int) -> Event:
    """An event of a user of its own, now."""
    now, user = time.time_ns() // 1000, f"{name}-{number}"
    return Event(f"event-{user}", user, "ad-1", "feed", "ad_click", now, now)


def post(live: Live, event: Event) -> int:
    """How many events were new: one or none."""
    return live.write([[WalEntry("event", event.ingest_ts, event)]])[0]


def follow(live: Live) -> None:
    """Answer from the store that the pointer names."""
    newer = live.newer()
    if newer:
        live.swap(newer).close()
    live.keep_up()


def times_counted(store: Store, user: str) -> tuple[int, int]:
    """How often a user's events stand in its history, and in its counters of all kept hours."""
    with store.reading() as txn:
        history = store.histories.seen(txn.get("history", user.encode()), 1 << 40)
    number = store.counters.keys.index(("user",))
    [name] = store.counters.names_of(number, np.array([[signed_hash(user)]]))
    with store.reading() as txn:
        rows = np.frombuffer(txn.get("hours", name), store.counters.row)
    return len(history), int(rows["counts"].sum())


def main(spec: str, lake: str, name: str) -> None:
    live = Live(lake, load_spec(Path(spec)))
    for number in itertools.count():
        post(live, event_of(name, number))
        print(number, flush=True)
        if number % 5 == 4:
            follow(live)


if __name__ == "__main__":
    main(*sys.argv[1:])
