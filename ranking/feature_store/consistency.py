"""Compares online with offline features: a day's logged requests, replayed against a store."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import date, timedelta
from itertools import islice
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tqdm import tqdm

from etl.spec.units import MICROS
from etl.tables import arrow, schemas
from etl.tables.declared_columns import counted_columns, logged_context_attributes
from etl.tables.lake import Lake
from etl.tables.schemas import RESERVED_ITEM_INDICES
from features.schema import ITEM_TABLE, FeatureSchema
from ranking.feature_store.attributes import AttributeVersion, upsert_attributes
from ranking.feature_store.encoded_attributes import AttributeValues
from ranking.feature_store.events import Event, ingest_event
from ranking.feature_store.fetch import FeatureFetcher
from ranking.feature_store.request import RankRequest
from ranking.feature_store.store import FeatureStore
from ranking.inputs.arrays import ItemFeatures, TeacherHistoryFeatures
from ranking.inputs.from_tables import InputBuilder, load_teacher_history
from ranking.inputs.recency_features import RecencyArrays
from ranking.student.config import InputLimits
from training.data.batch import Batch, Shuffle
from training.data.label_window import ALL_LABELS
from training.data.reader import ExampleReader

DECAYED_TOLERANCE = 1e-6
Row = Mapping[str, Any]
Readers = Mapping[str, ExampleReader]


@dataclass(frozen=True)
class ConsistencyReport:
    """The number of requests compared, and each mismatch: request id and array name."""

    num_requests: int
    mismatches: tuple[str, ...]


def check_consistency(
    store: FeatureStore,
    lake: Lake,
    day: date,
    input_limits: InputLimits,
    max_requests: int | None = None,
) -> ConsistencyReport:
    """Compare the features of a day's logged requests, read online and from the tables.

    The day's attribute versions and events are ingested in the order of their ingest time, each
    before the requests that follow it. Requests that landed after their day are excluded.

    Args:
        store: A store with all data up to the day before; it is written to.
        lake: The lake that the store was built from.
        day: The day to replay.
        input_limits: What a ranker reads of a request.
        max_requests: The number of requests to compare; all if None.
    """
    ingest_attribute_versions(store, lake, day)
    logged_events = arrow.snapshot(lake, schemas.events(lake.spec)).read(day=day)
    impressions = _impressions_by_id(lake, logged_events)
    events = events_by_ingest_time(lake, logged_events)
    next_event = next(events, None)
    sequence = store.metadata.sequence
    readers = {
        surface: ExampleReader.latest(lake, sequence, input_limits.max_length, (surface,))
        for surface in lake.spec.ad_surfaces
    }
    fetcher = FeatureFetcher(store, input_limits)
    compare = _Comparison(lake, day, input_limits, store.metadata.compressor_version)
    mismatches: list[str] = []
    num_requests = 0
    requests = islice(_requests_by_time(lake, readers, day), max_requests)
    for surface, batch in tqdm(requests, desc="replay", unit="request", disable=None):
        as_of = int(batch.as_of[0])
        with store.write_transaction() as txn:
            while next_event and next_event.ingest_ts < as_of * MICROS["s"]:
                ingest_event(store, txn, next_event)
                next_event = next(events, None)
        request = _rank_request(lake, surface, batch, impressions)
        mismatches += compare(fetcher, request, readers[surface], batch)
        num_requests += 1
    return ConsistencyReport(num_requests, tuple(mismatches))


class _Comparison:
    """Compares the online features of requests of a day with those from the tables."""

    def __init__(
        self, lake: Lake, day: date, input_limits: InputLimits, compressor_version: str | None
    ) -> None:
        self._last_day = day - timedelta(days=1)
        self._input_limits = input_limits
        self._teacher_embeddings = load_teacher_history(lake, input_limits, compressor_version)

    def __call__(
        self, fetcher: FeatureFetcher, request: RankRequest, reader: ExampleReader, batch: Batch
    ) -> list[str]:
        """The mismatches of one request."""
        online = fetcher(request)
        offline = InputBuilder(reader, self._teacher_embeddings, self._input_limits)(batch)
        is_known_item = reader.items.seen_by(self._last_day)
        tolerance = numeric_tolerance(reader.features)
        names = [
            *mismatched_arrays(online.requests, offline.requests, is_known_item, tolerance),
            *mismatched_arrays(online.candidates, offline.candidates, is_known_item, tolerance),
        ]
        return [f"{batch.request_ids[0]}: {name}" for name in names]


def numeric_tolerance(features: FeatureSchema) -> np.ndarray:
    """The tolerance of each numeric column (F): 0 except for decayed counts, which are rounded."""
    is_decayed = [c.aggregation == "decayed_count" for c in features.counter_transform.counters]
    tolerance = np.zeros(len(features.numeric_columns))
    tolerance[len(tolerance) - len(is_decayed) :][is_decayed] = DECAYED_TOLERANCE
    return tolerance


def mismatched_arrays(
    online: object, offline: object, is_known_item: np.ndarray, tolerance: np.ndarray
) -> Iterator[str]:
    """Names of the arrays that differ between two dataclasses of the same type.

    Item indices are compared only where `is_known_item` (items): rankers map all others to 0.
    Candidates' numbers may differ by `tolerance` (F), relative to numbers above 1.
    """
    for field in fields(cast("Any", online)):
        values = getattr(online, field.name), getattr(offline, field.name)
        for name, *pair in _array_pairs(field.name, *values):
            left, right = pair
            if name.endswith(f".{ITEM_TABLE}"):
                left, right = (_mask_unknown_items(array, is_known_item) for array in pair)
            elif name == "numeric" and left.shape == right.shape:
                difference = np.abs(left - right)
                is_close = difference <= tolerance * np.maximum(np.abs(right), 1)
                left = np.where(is_close, right, left)
            if not (left.shape == right.shape and np.array_equal(left, right, equal_nan=True)):
                yield name


def _array_pairs(
    name: str, online: object, offline: object
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Walk two nested structures together, down to their arrays."""
    if isinstance(online, np.ndarray) and isinstance(offline, np.ndarray):
        yield name, online, offline
    elif isinstance(online, Mapping) and isinstance(offline, Mapping):
        for key in sorted(online.keys() | offline.keys()):
            yield from _array_pairs(f"{name}.{key}", online[key], offline[key])
    elif isinstance(online, tuple) and isinstance(offline, tuple):
        for number, (left, right) in enumerate(zip(online, offline, strict=True)):
            yield from _array_pairs(f"{name}.{number}", left, right)
    else:
        assert isinstance(online, ItemFeatures | TeacherHistoryFeatures | RecencyArrays), name
        for field in fields(online):
            values = getattr(online, field.name), getattr(offline, field.name)
            yield from _array_pairs(f"{name}.{field.name}", *values)


def _mask_unknown_items(indices: np.ndarray, is_known_item: np.ndarray) -> np.ndarray:
    in_range = (indices >= RESERVED_ITEM_INDICES) & (indices < len(is_known_item))
    is_known = in_range & is_known_item[np.where(in_range, indices, 0)]
    return np.where(is_known, indices, 0)


def ingest_attribute_versions(store: FeatureStore, lake: Lake, day: date) -> None:
    """Add the versions of users and items that landed on a day."""
    for entity in ("user", "item"):
        declared = getattr(lake.spec.attributes, entity)
        if not declared:
            continue
        rows = arrow.snapshot(lake, schemas.attributes(lake.spec, entity)).read(day=day)
        with store.write_transaction() as txn:
            for row in rows.to_pylist():
                version = AttributeVersion.from_row(entity, row, declared)
                upsert_attributes(store, txn, entity, version, store.data_until)


def events_by_ingest_time(lake: Lake, logged_events: pa.Table) -> Iterator[Event]:
    """The events of a table as they would have been posted, in that order.

    Events ingested before the day on which they landed are visible from the start of that day (see
    etl/ingest/normalize.py), and those that name an event not before it: they count as posted just
    in time for that.
    """
    surfaces = {code: name for name, code in lake.spec.surface_codes.items()}
    types = {code: name for name, code in lake.spec.event_codes.items()}
    columns = counted_columns(lake.spec)
    events = []
    for row in logged_events.to_pylist():
        type_ = types[row["type"]]
        earliest = row["visible_ts"] - lake.spec.visibility_delays.get(type_, 0)
        event = Event(
            event_id=row["event_id"],
            user=row["user_id"],
            item=row["item_id"],
            surface=surfaces[row["surface"]],
            type=type_,
            event_ts=row["event_ts"],
            ingest_ts=max(row["ingest_ts"], earliest * MICROS["s"]),
            dwell_ms=row["dwell_ms"],
            value=row["value"],
            context=_without_prefix("ctx_", columns, row),
            attributes=_without_prefix("event_", columns, row),
        )
        events.append(event)
    return iter(sorted(events, key=lambda event: event.ingest_ts))


def _without_prefix(prefix: str, columns: Iterable[str], row: Row) -> AttributeValues:
    """The values of the columns with a prefix, by what follows it."""
    return {name.removeprefix(prefix): row[name] for name in columns if name.startswith(prefix)}


def _requests_by_time(lake: Lake, readers: Readers, day: date) -> Iterator[tuple[str, Batch]]:
    """The surface and the batch of each request of a day, in the order of time."""
    day_start = lake.spec.day_start(day)
    requests = []
    for surface, reader in readers.items():
        for batch in reader.batches([day], ALL_LABELS, 1, Shuffle(None)):
            if int(batch.as_of[0]) >= day_start:
                requests.append((surface, batch))
    yield from sorted(requests, key=lambda request: int(request[1].as_of[0]))


def _impressions_by_id(lake: Lake, logged_events: pa.Table) -> dict[str, Row]:
    code = lake.spec.event_codes[lake.spec.impression_type]
    rows = logged_events.filter(pc.equal(logged_events["type"], code)).to_pylist()
    return {row["impression_id"]: row for row in rows}


def _rank_request(
    lake: Lake, surface: str, batch: Batch, impressions: Mapping[str, Row]
) -> RankRequest:
    """The logged request of a batch as it would have been sent to the service."""
    rows = [impressions[impression_id] for impression_id in batch.impression_ids]
    names = list(logged_context_attributes(lake.spec))
    return RankRequest(
        user=batch.user_ids[0],
        surface=surface,
        candidates=[row["item_id"] for row in rows],
        context=[{name: row[f"ctx_{name}"] for name in names} for row in rows],
        as_of=int(batch.as_of[0]),
    )
