"""Converts the tables of a lake to the records of a feature store."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.array_types import Int64
from etl.spec.units import MICROS
from etl.tables import arrow, model_schemas, schemas
from etl.tables.arrow import Snapshot
from etl.tables.declared_columns import counted_columns, number_column
from etl.tables.lake import Lake
from features.counters.numeric_columns import fixed_point_of
from features.encoding.scalar import spark_xxhash64
from features.schema import counter_input_days
from ranking.feature_store.attributes import (
    ROWS_AT_ONCE,
    AttributeVersion,
    upsert_item,
    write_user_versions,
)
from ranking.feature_store.counter_keys import (
    KeyValues,
    context_key_values_of_events,
    distinct_entries,
    distinct_values_of_events,
    hash_text,
    item_key_values,
    map_distinct,
    user_key_values_of_events,
)
from ranking.feature_store.counter_rows import COUNTER_LEVELS, CountedEvents
from ranking.feature_store.events import are_ids_by_log, event_id_keys
from ranking.feature_store.items import (
    NEXT_ITEM_INDEX_KEY,
    blank_item_records,
    registered_item_records,
)
from ranking.feature_store.storage import (
    KNOWN_EVENT,
    TEACHER_HISTORY_DTYPE,
    KeyValuePairs,
    group_rows,
    storage_key,
    storage_keys,
)
from ranking.feature_store.store import (
    LATENESS_MARGIN_DAYS,
    MAX_REQUEST_AGE,
    FeatureStore,
)
from ranking.inputs.attribute_versions import readable_versions
from training.teacher.embeddings import of_compressor


@dataclass(frozen=True)
class TableSource:
    """Converts a lake's tables, up to the last day with data, to the records of a store."""

    lake: Lake
    store: FeatureStore
    data_until_day: date
    teacher_history_length: int

    @cached_property
    def events(self) -> Snapshot:
        """The table of events."""
        return arrow.snapshot(self.lake, schemas.events(self.lake.spec))

    def write_items(self, items: pa.Table) -> None:
        """Write the records of all items that have an index in the tables."""
        next_index = self.store.metadata.num_items.to_bytes(8, "big")
        with self.store.write_transaction() as txn:
            txn.put("meta", NEXT_ITEM_INDEX_KEY, next_index)
            for batch in items.to_batches(max_chunksize=ROWS_AT_ONCE):
                records = blank_item_records(self.store.layout, len(batch))
                records["index"] = batch["item_index"].to_numpy()
                keys = map(storage_key, batch["item_id"].to_pylist())
                values = (record.tobytes() for record in records)
                txn.put_many("items", list(zip(keys, values, strict=True)))

    def write_attribute_versions(self, entity: str) -> None:
        """Write the versions of users or items that a request can still read."""
        earliest = self.store.earliest_request
        if entity == "user" and self.lake.spec.user_counter_keys:  # replayed events read them, too
            earliest = min(earliest, self.store.final_before_ts // MICROS["s"])
        versions = self._attribute_versions(entity, earliest)
        with self.store.write_transaction() as txn:
            if entity == "user":
                write_user_versions(self.store, txn, versions, earliest)
                return
            for version in versions:
                upsert_item(self.store, txn, version, earliest)

    def _attribute_versions(self, entity: str, earliest: int) -> Iterator[AttributeVersion]:
        """Versions that are read from a second on, in the order of their `valid_from`."""
        order = [(name, "ascending") for name in (f"{entity}_id", "valid_from", "day")]
        first_day = self.lake.spec.last_day_before(earliest - MAX_REQUEST_AGE)
        rows = readable_versions(self.lake, entity, first_day, self.data_until_day).sort_by(order)
        declared = getattr(self.lake.spec.attributes, entity)
        for batch in rows.to_batches(max_chunksize=ROWS_AT_ONCE):
            for row in batch.to_pylist():
                yield AttributeVersion.from_row(entity, row, declared)

    def teacher_history_records(self) -> Iterator[tuple[str, KeyValuePairs]]:
        """The teacher embeddings of each user's most recent impressions that requests can read."""
        version = self.store.metadata.compressor_version
        if version is None:
            return
        schema = model_schemas.user_teacher_embeddings(self.lake.spec)
        table = arrow.snapshot(self.lake, schema)
        stored = of_compressor(rows_until(table, self.data_until_day), version)
        stored = stored.sort_by([(name, "ascending") for name in schema.order_by])
        rows = np.zeros(len(stored), TEACHER_HISTORY_DTYPE)
        rows["visible_ts"], rows["impression_ts"] = stored["visible_ts"], stored["impression_ts"]
        rows["item"] = stored["item_index"]
        embeddings = np.frombuffer(b"".join(stored["teacher_embedding_int4"].to_pylist()), np.uint8)
        rows["teacher_embedding_int4"] = embeddings.reshape(len(stored), -1)
        by_user = group_rows(storage_keys(stored["user_id"].to_pylist()), rows)
        yield "teacher_history", [(key, self._readable(rows).tobytes()) for key, rows in by_user]

    def _readable(self, rows: np.ndarray) -> np.ndarray:
        """Rows of a user that some request can read: those of an unfinished day are not visible."""
        num_visible = int(np.searchsorted(rows["visible_ts"], self.store.earliest_request))
        return rows[max(0, num_visible - self.teacher_history_length) :]

    def recent_counter_records(self) -> Iterator[tuple[str, KeyValuePairs]]:
        """The counter records of all events that the windows of a request can reach."""
        columns = ["user_id", "item_id", "surface", "type", "visible_ts", "event_ts"]
        columns += counted_columns(self.lake.spec)
        spec = self.lake.spec
        earliest_day = spec.day_of(self.store.earliest_request)
        first_day = earliest_day - timedelta(days=counter_input_days(spec))
        recent = self.events.read(columns, day=self._days_since(self.events, first_day))
        is_counted = pc.greater_equal(recent["visible_ts"], self._first_counted_second())
        yield from self.counter_records(recent.filter(is_counted))

    def _first_counted_second(self) -> int:
        """The earliest second that a window of a request can reach."""
        longest = self.lake.spec.counters.longest_window
        return self.store.earliest_request - longest - COUNTER_LEVELS[0].bucket_seconds

    def event_id_records(self) -> Iterator[tuple[str, KeyValuePairs]]:
        """Ids of recent events, which may be posted again or may be in the log already.

        Events that were excluded are among them, so that no store counts those in the log.
        """
        num_days = 2 * self.lake.spec.allowed_lateness_days + LATENESS_MARGIN_DAYS + 1
        first_day = self.data_until_day - timedelta(days=num_days)
        types = {code: name for name, code in self.lake.spec.event_codes.items()}
        by_log = are_ids_by_log(self.lake.spec)
        excluded = arrow.snapshot(self.lake, schemas.excluded_events(self.lake.spec))
        for table in (self.events, excluded):
            for day in self._days_since(table, first_day):
                rows = table.read(["event_id", "event_ts", "type", "log"], day=day)
                rows = rows.filter(pc.greater_equal(rows["event_ts"], self.store.final_before_ts))
                ids = (rows[name].to_pylist() for name in ("type", "event_id", "log"))
                keys = (
                    event_id_keys(types[code], id_, log if by_log else None)
                    for code, id_, log in zip(*ids, strict=True)
                )
                yield "event_ids", [(key, KNOWN_EVENT) for of_id in keys for key in of_id]

    def _days_since(self, table: Snapshot, first_day: date) -> list[date]:
        """The days of a table from a day on, up to the last day with data."""
        return [day for day in table.days() if first_day <= day <= self.data_until_day]

    def counter_records(self, events: pa.Table) -> Iterator[tuple[str, KeyValuePairs]]:
        """The counter records of events (N)."""
        counters = self.store.counters
        types = pa.array(sorted(counters.layout.event_types), pa.int8())
        events = events.filter(pc.is_in(events["type"], types))
        visible = events["visible_ts"].to_numpy()
        users = events["user_id"].combine_chunks().dictionary_encode()
        hashes = np.array([spark_xxhash64(name) for name in users.dictionary.to_pylist()], np.int64)
        items = registered_item_records(self.store, events["item_id"])
        key_values = {
            "user": hashes[users.indices.to_numpy()],
            "surface": events["surface"].to_numpy().astype(np.int64),
            **item_key_values(self.store.layout, items, visible),
            **self._user_key_values(users, visible),
            **context_key_values_of_events(self.lake.spec, events),
            **distinct_values_of_events(self.lake.spec, events),
        }
        numbers = {
            name: fixed_point_of(name).round(events[number_column(self.lake.spec, name)].to_numpy())
            for name in counters.aggregations.input_columns
        }
        distinct = counters.aggregations.distinct_columns
        if "item" in distinct:
            key_values["item_hash"] = map_distinct(hash_text, events["item_id"])
        entries = distinct_entries(distinct, key_values)
        event_types = events["type"].to_numpy().astype(np.int64)
        counted = CountedEvents(visible, event_types, numbers, entries)
        yield from counters.build_records(key_values, counted)

    def _user_key_values(self, users: pa.DictionaryArray, visible: Int64) -> KeyValues:
        """The counter keys of the users of events (N) when these became visible."""
        names = [f"attr_{name}" for name in self.lake.spec.user_counter_keys]
        if not names:
            return {}
        first_day = self.lake.spec.last_day_before(self._first_counted_second())
        columns = ["user_id", "valid_from", "day", *names]
        versions = readable_versions(self.lake, "user", first_day, self.data_until_day, columns)
        return user_key_values_of_events(self.store.layout, versions, users, visible)


def rows_until(table: Snapshot, day: date, columns: list[str] | None = None) -> pa.Table:
    """The rows of a table that landed up to the end of a day, with some columns or all."""
    days = [stored for stored in table.days() if stored <= day]
    return table.read(columns, day=days).combine_chunks()
