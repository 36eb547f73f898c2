"""Builds a feature store from a lake's tables, with all data until a second.

`materialize` builds the next version of a lake's store, with what the promoted rankers read, and
points the lake at it. Running services then load it.
"""

import itertools
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import date, timedelta
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tqdm import tqdm

from etl.array_types import Int64
from etl.errors import UserError
from etl.spec.units import MICROS
from etl.tables import arrow, atomic_io, model_schemas, schemas
from etl.tables.arrow import Snapshot
from etl.tables.declared_columns import counted_columns, number_column
from etl.tables.lake import Lake
from etl.tables.lease import hold_leases
from etl.tables.pointer import VersionPointer, remove_unreferenced_versions
from etl.tables.schemas import RESERVED_ITEM_INDICES
from etl.tables.uri import local_cache_path, resolve_uri
from features.counters.numeric_columns import fixed_point_of
from features.encoding.scalar import spark_xxhash64
from features.schema import counter_input_days
from ranking.feature_store.attributes import (
    VERSIONS_AT_ONCE,
    AttributeVersion,
    upsert_item,
    write_user_versions,
)
from ranking.feature_store.carried_histories import HistoryBuilder
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
    StoreMetadata,
    create_store,
    open_store,
)
from ranking.feature_store.wal import event_id_key, feature_store_pointer
from ranking.inputs.attribute_versions import readable_versions
from ranking.registry.manifest import RankerManifest, read_package
from ranking.registry.ranker import live_pointer
from training.teacher.embeddings import of_latest_compressor

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HistoryLengths:
    """The amount of data that a store holds per user.

    `events` of the named sequence, and `teacher_embeddings` of earlier impressions.
    """

    sequence: str
    events: int
    teacher_embeddings: int = 0


def build_feature_store(
    lake: Lake,
    folder: Path,
    data_until: int,
    lengths: HistoryLengths,
    earlier_stores: Sequence[Path] = (),
) -> FeatureStore:
    """Build a store in a new folder from all data until an epoch second, and open it.

    The folder appears only when the store is complete. The histories of the first of the earlier
    stores are reused whose histories are still those of the tables.
    """
    data_until_day = lake.spec.last_day_before(data_until)
    item_table = arrow.snapshot(lake, schemas.items(lake.spec))
    items = rows_until(item_table, data_until_day)
    metadata = StoreMetadata(
        spec=lake.spec,
        sequence=lengths.sequence,
        history_length=lengths.events,
        teacher_history_length=lengths.teacher_embeddings,
        data_until=data_until,
        num_items=1 + pc.max(items["item_index"]).as_py() if len(items) else RESERVED_ITEM_INDICES,
    )
    staging = atomic_io.staging_folder(folder)
    store = create_store(staging, metadata)
    source = TableSource(lake, store, data_until_day, lengths.teacher_embeddings)
    source.write_items(items)
    source.write_attribute_versions("user")
    source.write_attribute_versions("item")
    HistoryBuilder(lake, store, source.events, item_table, data_until_day).build(earlier_stores)
    records = itertools.chain(
        source.teacher_history_records(), source.recent_counter_records(), source.event_id_records()
    )
    for table, pairs in tqdm(records, desc="feature store", unit="table", disable=None):
        with store.write_transaction() as txn:
            txn.put_many(table, pairs)
    store.close()
    atomic_io.publish_folder(staging, folder)
    return open_store(folder, lake.spec)


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
        records = blank_item_records(self.store.layout, len(items))
        records["index"] = items["item_index"].to_numpy()
        keys = map(storage_key, items["item_id"].to_pylist())
        next_index = self.store.metadata.num_items.to_bytes(8, "big")
        with self.store.write_transaction() as txn:
            txn.put("meta", NEXT_ITEM_INDEX_KEY, next_index)
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
        for batch in rows.to_batches(max_chunksize=VERSIONS_AT_ONCE):
            for row in batch.to_pylist():
                yield AttributeVersion.from_row(entity, row, declared)

    def teacher_history_records(self) -> Iterator[tuple[str, KeyValuePairs]]:
        """The teacher embeddings of each user's most recent impressions."""
        schema = model_schemas.user_teacher_embeddings(self.lake.spec)
        if not self.teacher_history_length or not self.lake.exists(schema.name):
            return
        stored = of_latest_compressor(
            rows_until(arrow.snapshot(self.lake, schema), self.data_until_day)
        )
        stored = stored.sort_by([(name, "ascending") for name in schema.order_by])
        rows = np.zeros(len(stored), TEACHER_HISTORY_DTYPE)
        rows["visible_ts"], rows["impression_ts"] = stored["visible_ts"], stored["impression_ts"]
        rows["item"] = stored["item_index"]
        embeddings = np.frombuffer(b"".join(stored["teacher_embedding_int4"].to_pylist()), np.uint8)
        rows["teacher_embedding_int4"] = embeddings.reshape(len(stored), -1)
        by_user = group_rows(storage_keys(stored["user_id"].to_pylist()), rows)
        newest = [(key, rows[-self.teacher_history_length :].tobytes()) for key, rows in by_user]
        yield "teacher_history", newest

    def recent_counter_records(self) -> Iterator[tuple[str, KeyValuePairs]]:
        """The counter records of all events that the windows of a request can reach."""
        columns = ["user_id", "item_id", "surface", "type", "visible_ts", "event_ts"]
        columns += counted_columns(self.lake.spec)
        spec = self.lake.spec
        earliest_day = spec.day_of(self.store.earliest_request)
        first_day = earliest_day - timedelta(days=counter_input_days(spec))
        recent = self.events.read(columns, day=self._days_since(first_day))
        is_counted = pc.greater_equal(recent["visible_ts"], self._first_counted_second())
        yield from self.counter_records(recent.filter(is_counted))

    def _first_counted_second(self) -> int:
        """The earliest second that a window of a request can reach."""
        longest = self.lake.spec.counters.longest_window
        return self.store.earliest_request - longest - COUNTER_LEVELS[0].bucket_seconds

    def _days_since(self, first_day: date) -> list[date]:
        """The days with events, from a day on."""
        return [day for day in self.events.days() if first_day <= day <= self.data_until_day]

    def event_id_records(self) -> Iterator[tuple[str, KeyValuePairs]]:
        """Ids of recent events, which may be posted again or may be in the log already."""
        num_days = 2 * self.lake.spec.allowed_lateness_days + LATENESS_MARGIN_DAYS + 1
        first_day = self.data_until_day - timedelta(days=num_days)
        columns = ["event_id", "event_ts", "type"]
        recent = self.events.read(columns, day=self._days_since(first_day))
        rows = recent.filter(pc.greater_equal(recent["event_ts"], self.store.final_before_ts))
        types = {code: name for name, code in self.lake.spec.event_codes.items()}
        ids = zip(rows["type"].to_pylist(), rows["event_id"].to_pylist(), strict=True)
        yield "event_ids", [(event_id_key(types[code], id_), KNOWN_EVENT) for code, id_ in ids]

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


def rows_until(table: Snapshot, day: date) -> pa.Table:
    """The rows of a table that landed up to the end of a day."""
    return table.read(day=[stored for stored in table.days() if stored <= day]).combine_chunks()


def materialize_lease(lake: str, command: str) -> AbstractContextManager[None]:
    """The lease for building this machine's feature store of a lake; each machine has its own."""
    return hold_leases(str(local_cache_path(resolve_uri(lake))), ["materialize"], command)


def materialize(lake: Lake, data_until: int) -> str:
    """Build the lake's next feature store, point the lake at it, and return its name.

    It has all data until an epoch second. The promoted rankers determine what it holds; those that
    cannot be read are skipped with a warning.

    Raises:
        UserError: No promoted ranker can be read, or the rankers read different sequences.
    """
    lengths = required_lengths(promoted_manifests(lake))
    pointer = feature_store_pointer(lake.root)
    name = next_store_name(pointer, lake.spec.last_day_before(data_until))
    folder = local_cache_path(pointer.folder) / name
    state = pointer.read()
    retained = state.retained if state else ()
    earlier = [local_cache_path(pointer.folder) / version for version in reversed(retained)]
    build_feature_store(lake, folder, data_until, lengths, earlier).close()
    pointer.promote(name)
    remove_unreferenced_versions(pointer.folder, pointer)
    return name


def next_store_name(pointer: VersionPointer, day: date) -> str:
    """DAY-NUMBER with a number above all existing ones of the day.

    A process that has opened a store recognizes a newer one by its name.
    """
    names = [path.name for path in pointer.folder.iterdir()] if pointer.folder.exists() else []
    found = [re.fullmatch(rf"{day:%Y%m%d}-([0-9]+)", name) for name in names]
    return f"{day:%Y%m%d}-{1 + max((int(match[1]) for match in found if match), default=0)}"


def required_lengths(manifests: Sequence[RankerManifest]) -> HistoryLengths:
    """What rankers read together; raises UserError if they read different sequences."""
    sequences = sorted({manifest.sequence for manifest in manifests})
    if len(sequences) > 1:
        raise UserError(
            f"the rankers read the sequences {', '.join(sequences)}; train them on one sequence"
        )
    return HistoryLengths(
        sequence=sequences[0],
        events=max(manifest.max_length for manifest in manifests),
        teacher_embeddings=max(manifest.teacher_history_length for manifest in manifests),
    )


def promoted_manifests(lake: Lake) -> list[RankerManifest]:
    """The manifests of the promoted rankers; those that cannot be read are skipped with a warning.

    Raises UserError if there is none.
    """
    manifests, errors = [], []
    for surface in lake.spec.ad_surfaces:
        try:
            folder = live_pointer(lake.root, surface).live_folder
            if folder:
                manifests.append(read_package(folder).manifest)
        except UserError as error:
            errors.append(str(error))
            log.warning("ranker skipped: %s", error)
    if not manifests:
        no_ranker = f"no ranker of {lake.root} is promoted; run `gemline rank promote` first"
        raise UserError("; ".join(errors) or no_ranker)
    return manifests
