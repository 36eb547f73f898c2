"""Events into the store: histories and counters."""

from dataclasses import dataclass

import numpy as np

from etl.clock import EARLIEST, SKEW
from etl.errors import UserError
from etl.spec.model import DataSpec
from etl.spec.units import MICROS
from etl.tables.contracts import item_key_columns
from features.encoded import signed_hash
from features.history.pack import dwell_byte
from ranking.online.attributes import known_item
from ranking.online.database import Txn
from ranking.online.layout import HISTORY, UNKNOWN, key_of
from ranking.online.store import Store


@dataclass(frozen=True)
class Event:
    """One event, by the names of the spec; times in µs."""

    event_id: str
    user: str
    item: str
    surface: str
    type: str
    event_ts: int
    ingest_ts: int
    dwell_ms: float | None = None


def visible_ts(spec: DataSpec, event: Event) -> int:
    """The second after which requests see an event, as offline: see etl/parse.py.

    It has come through the log that declares its type; its delay counts from the ingest on.
    """
    ingested = event.ingest_ts // MICROS["s"] + spec.delays.get(event.type, 0)
    return max(event.event_ts // MICROS["s"], ingested)


def check_event(spec: DataSpec, event: Event) -> None:
    """Raises UserError where an event breaks the rules that stored ones keep."""
    for what, name, known in (
        ("surface", event.surface, spec.surface_codes),
        ("event type", event.type, spec.event_codes),
    ):
        if name not in known:
            raise UserError(f"unknown {what} {name!r}; known: {', '.join(known)}")
    if not (event.user and event.item and event.event_id):
        raise UserError("an event needs a user, an item and an id")
    if not EARLIEST <= event.event_ts <= event.ingest_ts + SKEW * MICROS["s"]:
        raise UserError(
            f"event {event.event_id} is of {event.event_ts} µs: before 2000, or after now"
        )
    if event.ingest_ts - event.event_ts > spec.lateness * MICROS["s"]:
        raise UserError(f"event {event.event_id} is later than the spec's lateness")
    if event.dwell_ms is not None and not 0 <= event.dwell_ms < 1e300:
        raise UserError(f"event {event.event_id} has a dwell of {event.dwell_ms} ms")


def ingest_event(store: Store, txn: Txn, event: Event) -> None:
    """Add an event that was not added before to its user's history and to the counters."""
    visible, now = visible_ts(store.spec, event), event.ingest_ts // MICROS["s"]
    code = store.spec.event_codes[event.type]
    head = known_item(store, txn, event.item)
    row = np.zeros(1, HISTORY)
    row["visible"], row["happened"] = visible, event.event_ts
    row["event"], row["item"], row["type"] = event.event_id.encode(), head["index"], code
    row["surface"] = store.spec.surface_codes[event.surface]
    row["dwell"] = dwell_byte(np.array([np.nan if event.dwell_ms is None else event.dwell_ms]))
    user = key_of(event.user)
    kept = store.histories.with_event(txn.get("history", user), row, now)
    if kept is not None:
        txn.put("history", user, kept)
    known = key_parts(store, event.user, event.surface, np.array([head]), visible)
    names = [found[0] for found in store.counters.names(known)]
    counted = [name for name in names if name is not None]
    store.counters.add(txn, counted, visible, code, now)


def key_parts(
    store: Store, user: str, surface: str, heads: np.ndarray, second: int
) -> dict[str, np.ndarray]:
    """The single keys of counters (N) for items as they were known at a second."""
    n = len(heads)
    known = (heads["since"] != UNKNOWN) & (heads["since"] < second)
    parts = {
        "user": np.full(n, signed_hash(user)),
        "surface": np.full(n, store.spec.surface_codes[surface]),
        "item": heads["index"].astype(np.int64),
    }
    for number, name in enumerate(item_key_columns(store.spec)):
        key = np.where(known, heads["keys"][:, number], UNKNOWN)
        parts[name.removeprefix("k_")] = key
    return parts
