"""Writes events and attribute versions into a feature store.

An event extends its user's history and increments counters. A version of a user or an item is added
to the versions of that entity, and what an item offers to its bids.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from etl.errors import UserError
from etl.event_time import MAX_CLOCK_SKEW_SECONDS, MIN_EVENT_TS, compute_visible_ts
from etl.spec.attributes import CategoricalAttribute, NumericAttribute, VectorAttribute
from etl.spec.counters import InputColumn
from etl.spec.model import DataSpec
from etl.spec.units import DAY, MICROS
from features.encoding.scalar import encode_categorical, encode_numeric, spark_xxhash64
from features.history.codec import quantize_dwell
from features.numeric_columns import FIXED_POINT
from ranking.feature_store.items import (
    counter_key_values,
    read_item_records,
    register_items,
    update_first_version,
)
from ranking.feature_store.storage import (
    BID_DTYPE,
    HISTORY_DTYPE,
    RecordLayout,
    Txn,
    storage_key,
)
from ranking.feature_store.store import MAX_REQUEST_AGE, FeatureStore
from ranking.scoring.candidates import NO_ADVERTISER

AttributeValues = Mapping[str, object]
Attribute = CategoricalAttribute | NumericAttribute | VectorAttribute
MAX_FUTURE_SECONDS = 30 * DAY  # maximum distance of a posted valid_from into the future


@dataclass(frozen=True)
class AttributeVersion:
    """Attributes of a user or an item from `valid_from` (µs) on, by their names in the spec.

    `bid`, `goal` and `target_roas` are those of an item's campaign. In a posted version, None keeps
    the previous one, or the attributes as a whole; in one from the tables, None is a missing value.
    """

    entity_id: str
    valid_from: int
    attributes: AttributeValues | None
    bid: float | None = None
    goal: str | None = None
    target_roas: float | None = None

    @classmethod
    def from_row(
        cls, entity: str, row: Mapping[str, Any], declared: Iterable[str]
    ) -> "AttributeVersion":
        """The version in a row of a table of attributes, with the declared ones."""
        return cls(
            entity_id=row[f"{entity}_id"],
            valid_from=row["valid_from"],
            attributes={name: row[f"attr_{name}"] for name in declared},
            bid=row.get("bid"),
            goal=row.get("goal"),
            target_roas=row.get("target_roas"),
        )


def validate_version(layout: RecordLayout, entity: str, version: AttributeVersion) -> None:
    """Check the names and types of a posted version against the spec.

    Raises:
        UserError: An attribute or goal is not declared, a value has the wrong type, there is a bid
            although the spec has no auction, or a target ROAS that no bid can follow.
    """
    spec = layout.spec
    declared = getattr(spec.attributes, entity)
    unknown = sorted(set(version.attributes or ()) - set(declared))
    if unknown:
        raise UserError(f"no {', '.join(unknown)} of {entity}s; known: {', '.join(declared)}")
    goals = spec.auction.goal_objectives if spec.auction and entity == "item" else {}
    if version.goal is not None and version.goal not in goals:
        known = ", ".join(goals) or "none"
        raise UserError(f"unknown campaign goal {version.goal!r}; known: {known}")
    if version.bid is not None and not goals:
        raise UserError(f"{version.entity_id} has a bid, but the spec has no auction: leave it out")
    if version.target_roas is not None and not (spec.auction and spec.auction.target_roas):
        raise UserError(
            f"{version.entity_id} has a target ROAS, but the auction of the spec has no "
            "`target_roas`: leave it out"
        )
    if version.target_roas and version.goal and not _has_value(spec, version.goal):
        raise UserError(
            f"{version.entity_id} has a target ROAS, but outcomes of its goal {version.goal!r} "
            "have no values: leave the target out"
        )
    if version.attributes is not None:
        encode_version(layout, entity, version)


def _has_value(spec: DataSpec, goal: str) -> bool:
    assert spec.auction
    return spec.objectives[spec.auction.goal_objectives[goal]].value


def validate_valid_from(valid_from: int, now: int) -> None:
    """Raise UserError if the `valid_from` (µs) of a posted version is implausible at `now` (µs)."""
    if not MIN_EVENT_TS <= valid_from <= now + MAX_FUTURE_SECONDS * MICROS["s"]:
        raise UserError(
            f"valid_from is {valid_from // MICROS['ms']}: it is in milliseconds since 1970, not "
            f"before 2000, and at most {MAX_FUTURE_SECONDS // DAY} days ahead"
        )


def upsert_attributes(
    store: FeatureStore, txn: Txn, entity: str, version: AttributeVersion, now: int
) -> None:
    """Add a version from the tables of a user or an item; see `upsert_user` and `upsert_item`."""
    if entity == "user":
        upsert_user(store, txn, version, now)
    else:
        upsert_item(store, txn, version, now)


def upsert_user(store: FeatureStore, txn: Txn, version: AttributeVersion, now: int) -> None:
    """Add a version of a user, replacing one with the same `valid_from`.

    Versions that no request after about `now` (seconds) can read are dropped.

    Raises:
        UserError: A value has the wrong type.
    """
    row = encode_version(store.layout, "user", version)
    key = storage_key(version.entity_id)
    _insert_version(txn, "users", key, row, now - MAX_REQUEST_AGE)


def upsert_item(
    store: FeatureStore, txn: Txn, version: AttributeVersion, now: int, is_posted: bool = False
) -> None:
    """Add a version of an item and its bid, replacing those with the same `valid_from`.

    An item that was never seen is registered. A posted version keeps the bid, goal and attributes
    that it leaves out. Versions that no request after about `now` (seconds) can read are dropped.

    Raises:
        UserError: A value has the wrong type.
    """
    earliest_request = now - MAX_REQUEST_AGE
    register_items(store.layout, txn, [version.entity_id])
    if version.attributes is not None:
        update_first_version(
            store.layout, txn, version.entity_id, version.valid_from, version.attributes
        )
        record = read_item_records(store.layout, txn, [version.entity_id])[0]
        row = encode_version(store.layout, "item", version)
        key = int(record["index"]).to_bytes(4, "big")
        _insert_version(txn, "item_versions", key, row, earliest_request)
    if store.spec.auction:
        _upsert_bid(store.spec, txn, version, earliest_request, is_posted)


def encode_version(layout: RecordLayout, entity: str, version: AttributeVersion) -> np.ndarray:
    """Encode a version as the record (1) that rankers read.

    Raises:
        UserError: A value has the wrong type.
    """
    declared: Mapping[str, Attribute] = getattr(layout.spec.attributes, entity)
    group = getattr(layout.features, entity)
    record = np.zeros(1, getattr(layout, entity))
    record["valid_from"] = version.valid_from
    categorical, vectors = list(group.categorical), []
    for name, attribute in declared.items():
        value, column = (version.attributes or {}).get(name), f"{entity}_{name}"
        if isinstance(attribute, VectorAttribute):
            vectors.append(_validated_vector(name, value, attribute.width))
        elif isinstance(attribute, NumericAttribute):
            number = encode_numeric(attribute, _validated_float(name, value))
            record["numbers"][0, group.numeric.index(column)] = number
        else:
            category = encode_categorical(attribute, _validated_string(name, value))
            record["ids"][0, categorical.index(column)] = category
    if vectors:
        record["content_vectors"][0] = np.concatenate(vectors)
    return record


def _upsert_bid(
    spec: DataSpec, txn: Txn, version: AttributeVersion, earliest_request: int, is_posted: bool
) -> None:
    """Add the bid of an item's version; a posted one that changes nothing is skipped."""
    key = storage_key(version.entity_id)
    rows = np.frombuffer(txn.get("bids", key), BID_DTYPE)
    current = rows[rows["valid_from"] <= version.valid_from][-1:]
    if not is_posted or not len(current):
        current = np.array([(0, 0.0, 0, 0.0, NO_ADVERTISER)], BID_DTYPE)
    merged = _merge_bid(spec, current, version)
    offer = ["bid", "goal", "target_roas", "advertiser"]
    if not is_posted or merged[offer] != current[offer]:
        _insert_version(txn, "bids", key, merged, earliest_request)


def _merge_bid(spec: DataSpec, current_bid: np.ndarray, version: AttributeVersion) -> np.ndarray:
    """The current bid (1) with the fields that a version sets."""
    assert spec.auction
    goals, merged = list(spec.auction.goal_objectives), current_bid.copy()
    merged["valid_from"] = version.valid_from
    if version.bid is not None:
        merged["bid"] = version.bid
    if version.goal is not None:
        merged["goal"] = goals.index(version.goal) + 1 if version.goal in goals else 0
    if version.target_roas is not None:
        merged["target_roas"] = version.target_roas
    if version.attributes is not None:
        name = version.attributes.get(spec.auction.advertiser or "")
        merged["advertiser"] = NO_ADVERTISER if name is None else spark_xxhash64(str(name))
    return merged


def _insert_version(
    txn: Txn, table: str, key: bytes, version: np.ndarray, earliest_request: int
) -> None:
    """Insert a version (1) and drop those that no request from a second on can read.

    A request can read the latest version valid strictly before it, and all later ones.
    """
    stored = np.frombuffer(txn.get(table, key), version.dtype)
    others = stored[stored["valid_from"] != version["valid_from"]]
    rows = np.concatenate((others, version))
    rows = rows[np.argsort(rows["valid_from"], kind="stable")]
    num_before = int(np.searchsorted(rows["valid_from"], earliest_request * MICROS["s"]))
    txn.put(table, key, rows[max(0, num_before - 1) :].tobytes())


def _validated_float(name: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{name} is {value!r}; it is a number")
    return float(value)


def _validated_string(name: str, value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise UserError(f"{name} is {value!r}; it is a string")


def _validated_vector(name: str, value: object, width: int) -> np.ndarray:
    """A vector (width): zeros if missing or of another width, and in place of non-finite values."""
    if value is None:
        return np.zeros(width, np.float32)
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise UserError(f"{name} is {value!r}; it is a list of {width} numbers")
    vector = np.array(value, np.float32)
    if vector.shape != (width,):
        return np.zeros(width, np.float32)
    return np.nan_to_num(vector, nan=0.0, posinf=0.0, neginf=0.0)


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
    value: float | None = None


def visible_ts(spec: DataSpec, event: Event) -> int:
    """The second after which requests see an event, as offline: see etl/event_time.py.

    The delay of the source that declares its type counts from the ingest time.
    """
    delay = spec.visibility_delays.get(event.type, 0)
    return compute_visible_ts(event.event_ts, event.ingest_ts, delay)


def validate_event(spec: DataSpec, event: Event) -> None:
    """Raise UserError if an event breaks the rules that ingested log records keep."""
    for field, name, known in (
        ("surface", event.surface, spec.surface_codes),
        ("event type", event.type, spec.event_codes),
    ):
        if name not in known:
            raise UserError(f"unknown {field} {name!r}; known: {', '.join(known)}")
    if not (event.user and event.item and event.event_id):
        raise UserError("an event needs a user, an item and an id")
    if not MIN_EVENT_TS <= event.event_ts <= event.ingest_ts + MAX_CLOCK_SKEW_SECONDS * MICROS["s"]:
        raise UserError(
            f"event {event.event_id} has the event time {event.event_ts} µs: before 2000, or in "
            "the future"
        )
    if event.ingest_ts - event.event_ts > spec.allowed_lateness * MICROS["s"]:
        raise UserError(f"event {event.event_id} is later than the spec's allowed_lateness")
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
    key_values = counter_key_values(store.layout, event.user, event.surface, records, visible)
    record_keys = [keys[0] for keys in store.counters.record_keys(key_values)]
    known_keys = [key for key in record_keys if key is not None]
    event_code, numbers = store.spec.event_codes[event.type], _numbers(store, event)
    store.counters.increment(txn, known_keys, visible, event_code, numbers, now)


def _history_row(store: FeatureStore, event: Event, visible: int, item_index: int) -> np.ndarray:
    row = np.zeros(1, HISTORY_DTYPE)
    row["visible_ts"], row["event_ts"] = visible, event.event_ts
    row["event"], row["item"] = event.event_id.encode(), item_index
    row["type"] = store.spec.event_codes[event.type]
    row["surface"] = store.spec.surface_codes[event.surface]
    row["dwell"] = quantize_dwell(_dwell(event))
    return row


def _numbers(store: FeatureStore, event: Event) -> dict[InputColumn, int]:
    """The numbers of an event of which counters have functions, in fixed point."""
    values = {"dwell": event.dwell_ms, "value": event.value}
    numbers = {}
    for name in store.counters.aggregations.input_columns:
        value = np.array([np.nan if values[name] is None else values[name]], np.float64)
        numbers[name] = int(FIXED_POINT[name].round(value)[0])
    return numbers


def _dwell(event: Event) -> npt.NDArray[np.float64]:
    """The dwell of an event in milliseconds (1); NaN where it has none."""
    return np.array([np.nan if event.dwell_ms is None else event.dwell_ms])
