"""Writes events into a feature store: an event extends its user's history and counters."""

from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from etl.array_types import Float64, Int64
from etl.errors import UserError
from etl.event_time import MAX_CLOCK_SKEW_SECONDS, MIN_EVENT_TS, compute_visible_ts
from etl.spec.model import DataSpec
from etl.spec.units import MICROS
from features.counters.numeric_columns import fixed_point_of
from features.encoding.scalar import spark_xxhash64
from features.history.codec import quantize_dwell
from ranking.feature_store.counter_keys import (
    context_key_values_of_event,
    counter_key_values,
    distinct_entries,
    distinct_values_of_event,
)
from ranking.feature_store.counter_rows import CountedEvents
from ranking.feature_store.encoded_attributes import AttributeValues, validated_float
from ranking.feature_store.items import read_item_records, register_items
from ranking.feature_store.storage import (
    HISTORY_DTYPE,
    Txn,
    storage_key,
)
from ranking.feature_store.store import FeatureStore


@dataclass(frozen=True)
class Event:
    """One event, by the names of the spec; times in µs.

    `context` has the logged attributes of the context that counters read, and `attributes` those
    of the event. `log` is the log in which the id is unique; without it, the id counts as that of
    any event of its type.
    """

    event_id: str
    user: str
    item: str
    surface: str
    type: str
    event_ts: int
    ingest_ts: int
    dwell_ms: float | None = None
    value: float | None = None
    context: AttributeValues = field(default_factory=dict)
    attributes: AttributeValues = field(default_factory=dict)
    log: str | None = None

    @property
    def id_keys(self) -> list[bytes]:
        """The deduplication keys of the event; the last identifies it."""
        return event_id_keys(self.type, self.event_id, self.log)

    def number(self, name: str) -> float | None:
        """The dwell, the value, or a numeric attribute of the event or its context.

        Raises:
            UserError: The attribute is not a number.
        """
        if name == "dwell":
            return self.dwell_ms
        if name == "value":
            return self.value
        raw = self.attributes.get(name, self.context.get(name))
        return validated_float(f"{name} of event {self.event_id}", raw)


def event_id_keys(type_: str, event_id: str, log: str | None) -> list[bytes]:
    """The deduplication keys of an event id, which is unique only among events of its type.

    The first is that of the id in any log, the last that of the id in its log, if one is given.
    """
    texts = [f"{type_}\x1f{event_id}"]
    if log is not None:
        texts.append(f"{log}\x1e{texts[0]}")
    return [blake2b(text.encode(), digest_size=8).digest() for text in texts]


def are_ids_by_log(spec: DataSpec) -> bool:
    """Whether events of two logs may have the same id, as offline: see etl/ingest/copies.py."""
    return len(spec.log_sources) > 1 and not spec.shared_event_ids


def visible_ts(spec: DataSpec, event: Event) -> int:
    """The second after which requests see an event, as offline: see etl/event_time.py.

    The delay of the source that declares its type counts from the ingest time.
    """
    delay = spec.visibility_delays.get(event.type, 0)
    return compute_visible_ts(event.event_ts, event.ingest_ts, delay)


def validate_event(spec: DataSpec, event: Event) -> None:
    """Raise UserError if an event breaks the rules that ingested log records keep."""
    for kind, name, known in (
        ("surface", event.surface, spec.surface_codes),
        ("event type", event.type, spec.event_codes),
    ):
        if name not in known:
            raise UserError(f"unknown {kind} {name!r}; known: {', '.join(known)}")
    if not (event.user and event.item and event.event_id):
        raise UserError("an event needs a user, an item and an id")
    if not MIN_EVENT_TS <= event.event_ts <= event.ingest_ts + MAX_CLOCK_SKEW_SECONDS * MICROS["s"]:
        raise UserError(
            f"event {event.event_id} has the event time {event.event_ts} µs: before 2000, or in "
            "the future"
        )
    ingest_day = spec.day_of(event.ingest_ts // MICROS["s"])
    if event.event_ts < (spec.day_start(ingest_day) - spec.allowed_lateness) * MICROS["s"]:
        raise UserError(
            f"event {event.event_id} occurred more than the spec's allowed_lateness before its "
            "day of ingest began"
        )
    context_key_values_of_event(spec, event.context, event.event_ts // MICROS["s"])
    distinct_values_of_event(spec, event.attributes)
    for aggregation in spec.counters.numeric_aggregations:
        event.number(aggregation.column)
    if event.dwell_ms is not None and not 0 <= event.dwell_ms < 1e300:
        raise UserError(f"event {event.event_id} has a dwell of {event.dwell_ms} ms")
    if event.value is not None and not abs(event.value) < 1e300:
        raise UserError(f"event {event.event_id} has a value of {event.value}")


def ingest_event(store: FeatureStore, txn: Txn, event: Event) -> None:
    """Add a new event to its user's history and to the counters.

    An item that was never seen is registered. The caller must ensure that the event is new.
    """
    visible, now = visible_ts(store.spec, event), event.ingest_ts // MICROS["s"]
    register_items(store.layout, txn, [event.item])
    records = read_item_records(store.layout, txn, [event.item])
    row = _history_row(store, event, visible, int(records["index"][0]))
    store.histories.append_event(txn, storage_key(event.user), row, now)
    key_values = counter_key_values(store.layout, txn, event.user, event.surface, records, visible)
    occurred = event.event_ts // MICROS["s"]
    key_values |= context_key_values_of_event(store.spec, event.context, occurred)
    key_values |= distinct_values_of_event(store.spec, event.attributes)
    record_keys = [keys[0] for keys in store.counters.record_keys(key_values)]
    known_keys = [key for key in record_keys if key is not None]
    key_values["item_hash"] = np.array([spark_xxhash64(event.item)])
    counted = CountedEvents(
        np.array([visible]),
        np.array([store.spec.event_codes[event.type]]),
        _numbers(store, event),
        distinct_entries(store.counters.aggregations.distinct_columns, key_values),
    )
    store.counters.increment(txn, known_keys, counted, now)


def _history_row(store: FeatureStore, event: Event, visible: int, item_index: int) -> np.ndarray:
    row = np.zeros(1, HISTORY_DTYPE)
    row["visible_ts"], row["event_ts"] = visible, event.event_ts
    row["event"], row["item"] = event.event_id.encode(), item_index
    row["type"] = store.spec.event_codes[event.type]
    row["surface"] = store.spec.surface_codes[event.surface]
    row["dwell"] = quantize_dwell(_dwell(event))
    return row


def _numbers(store: FeatureStore, event: Event) -> dict[str, Int64]:
    """The numbers (1) of an event of which counters have functions, in fixed point."""
    numbers = {}
    for name in store.counters.aggregations.input_columns:
        number = event.number(name)
        value = np.array([np.nan if number is None else number], np.float64)
        numbers[name] = fixed_point_of(name).round(value)
    return numbers


def _dwell(event: Event) -> Float64:
    """The dwell of an event in milliseconds (1); NaN where it has none."""
    return np.array([np.nan if event.dwell_ms is None else event.dwell_ms])
