"""Live counters that are exact to the second, from three levels of records.

The events of a key before a second are those of three records, without touching single events:

* `hours`: one record per key; all whole hours before the second.
* `minutes`: one record per key and hour. Only that of the edge hour, which contains the second, is
  read: its whole minutes before the second.
* `seconds`: one record per key and minute. Only that of the edge minute is read.

A record of the lower levels has at most 60 rows, and one of the first level has the hours of the
longest window. The cost of counting an event or reading a window therefore does not grow with the
number of events, and no window is rounded to a bucket.

What a row holds is in ranking/feature_store/counter_rows.py, and how windows are read from rows in
ranking/feature_store/counter_windows.py.

N events, Q keys.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from etl.array_types import Float64, Int64
from etl.spec.model import DataSpec
from etl.spec.units import DAY
from features.counters.aggregations import Aggregations
from ranking.feature_store.counter_rows import (
    COUNTER_LEVELS,
    LOW_32_BITS,
    UINT32,
    CountedEvents,
    CounterLevel,
    FieldUpdate,
    RowLayout,
    child_record_key,
)
from ranking.feature_store.counter_windows import read_windows
from ranking.feature_store.storage import UNKNOWN, KeyValuePairs, Txn

MAX_REQUEST_LAG = 2 * DAY  # seconds by which a request may be older than the most recent event


@dataclass(frozen=True)
class Counters:
    """The counters of a spec: what is aggregated, and the columns of each key."""

    aggregations: Aggregations
    key_columns: tuple[tuple[str, ...], ...]

    @classmethod
    def from_spec(cls, spec: DataSpec) -> "Counters":
        """The counters that a spec declares."""
        return cls(Aggregations.from_spec(spec), spec.counters.keys)

    @cached_property
    def layout(self) -> RowLayout:
        """The layout of the rows of records."""
        return RowLayout(self.aggregations)

    @property
    def retention_seconds(self) -> int:
        """How long events are kept: the longest window, and the lag allowed for a request."""
        return self.aggregations.longest_window + MAX_REQUEST_LAG

    def record_keys(self, key_values: Mapping[str, Int64]) -> list[list[bytes | None]]:
        """For each counter key of the spec, the record keys (N) of its values.

        Args:
            key_values: The values (N) of each column that occurs in a counter key.

        Returns:
            A list per counter key; None if a value of the key is unknown.
        """
        result: list[list[bytes | None]] = []
        for key_index, columns in enumerate(self.key_columns):
            values = np.stack([key_values[column] for column in columns], 1)
            is_known = (values != UNKNOWN).all(1).tolist()
            names = self.encode_record_keys(key_index, values)
            result.append(
                [name if known else None for name, known in zip(names, is_known, strict=True)]
            )
        return result

    def encode_record_keys(self, key_index: int, values: Int64) -> list[bytes]:
        """The record keys of values (N, columns) of a counter key, given by its index."""
        size, raw = values.shape[1] * 8, values.astype(">i8").tobytes()
        prefix = bytes([key_index])
        return [prefix + raw[start : start + size] for start in range(0, len(raw), size)]

    def increment(
        self, txn: Txn, record_keys: Iterable[bytes], event: CountedEvents, now: int
    ) -> None:
        """Count one event (N = 1) for some keys, and drop the hours no request after `now` reads.

        The event may be older than events that were counted before.
        """
        if int(event.types[0]) not in self.layout.event_types:
            return
        epoch_second = int(event.epoch_seconds[0])
        updates = [(level, self.layout.updates(level, event)) for level in COUNTER_LEVELS]
        first_hour = (now - self.retention_seconds) // COUNTER_LEVELS[0].bucket_seconds
        for key in record_keys:
            level_key = key
            for level, updates_of_level in updates:
                bucket = epoch_second // level.bucket_seconds
                record = txn.get(level.table, level_key)
                rows = self._update_bucket(level, record, bucket, updates_of_level)
                txn.put(level.table, level_key, rows)
                level_key = child_record_key(key, bucket)
            self._drop_expired(txn, key, first_hour)

    def _update_bucket(
        self, level: CounterLevel, record: bytes, bucket: int, updates: Iterable[FieldUpdate]
    ) -> bytes:
        """A record after changes of a bucket; its rows stay sorted by bucket."""
        row_size = self.layout.dtype(level).itemsize

        def bucket_of_row(row: int) -> int:
            return int(UINT32.unpack_from(record, row * row_size)[0])

        num_rows = len(record) // row_size
        row = bisect_left(range(num_rows), bucket, key=bucket_of_row)
        updated, start = bytearray(record), row * row_size
        if row == num_rows or bucket_of_row(row) != bucket:
            updated[start:start] = self.layout.empty_row(level, bucket)
        for update in updates:
            update.apply(updated, start)
        return bytes(updated)

    def _drop_expired(self, txn: Txn, record_key: bytes, first_hour: int) -> None:
        """Remove a key's hours before `first_hour`, and the minutes and seconds within them."""
        hours_dtype, minutes_dtype = (self.layout.dtype(level) for level in COUNTER_LEVELS[:2])
        hours = txn.get("hours", record_key)
        if UINT32.unpack_from(hours)[0] >= first_hour:
            return
        rows = np.frombuffer(hours, hours_dtype)
        num_expired = int(np.searchsorted(rows["bucket"], first_hour))
        for hour in rows["bucket"][:num_expired].tolist():
            minutes_key = child_record_key(record_key, hour)
            minutes = np.frombuffer(txn.get("minutes", minutes_key), minutes_dtype)["bucket"]
            for minute in minutes.tolist():
                txn.delete("seconds", child_record_key(record_key, minute))
            txn.delete("minutes", minutes_key)
        txn.put("hours", record_key, rows[num_expired:].tobytes())

    def build_records(
        self, key_values: Mapping[str, Int64], events: CountedEvents
    ) -> Iterator[tuple[str, KeyValuePairs]]:
        """All records of N events at once, as `increment` would write them one by one.

        Args:
            key_values: The values (N) of key columns. Counter keys with other columns are skipped.
            events: The events; those of other types than `layout.event_types` leave empty rows.

        Yields:
            The name of a table, and keys and values to write into it.
        """
        for key_index, columns in enumerate(self.key_columns):
            if not set(columns) <= set(key_values):
                continue
            values = np.stack([key_values[column] for column in columns], 1)
            is_known = (values != UNKNOWN).all(1)
            distinct, value_index = np.unique(values[is_known], axis=0, return_inverse=True)
            record_keys = self.encode_record_keys(key_index, distinct)
            yield from self._build_key_records(record_keys, value_index.ravel(), events[is_known])

    def _build_key_records(
        self, record_keys: Sequence[bytes], value_index: Int64, events: CountedEvents
    ) -> Iterator[tuple[str, KeyValuePairs]]:
        """The records of N events of one counter key; `value_index` points into `record_keys`."""
        if not len(value_index):
            return
        parents = value_index << 32  # record key and bucket of the level above, packed
        for level in COUNTER_LEVELS:
            buckets = (value_index << 32) + events.epoch_seconds // level.bucket_seconds
            distinct, row = np.unique(buckets, return_inverse=True)
            rows = self.layout.build_rows(level, row.ravel(), events)
            rows["bucket"] = distinct & LOW_32_BITS
            parent_of_row = np.zeros(len(distinct), np.int64)
            parent_of_row[row.ravel()] = parents
            starts = np.flatnonzero(np.diff(parent_of_row, prepend=-1))
            stops = np.append(starts[1:], len(rows))
            pairs = []
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
                key = _record_key(record_keys, level.table, int(parent_of_row[start]))
                pairs.append((key, rows[start:stop].tobytes()))
            yield level.table, pairs
            parents = buckets

    def values(self, txn: Txn, record_keys: Sequence[bytes | None], as_of: int) -> Float64:
        """The counters of keys (Q, columns) as of a second; None is a key with unknown values."""
        known = [key for key in record_keys if key is not None]
        rows = np.repeat(self.aggregations.missing[None], len(record_keys), axis=0)
        is_known = [key is not None for key in record_keys]
        rows[is_known] = read_windows(self.layout, txn, known, as_of)
        return rows


def _record_key(record_keys: Sequence[bytes], table: str, packed_parent: int) -> bytes:
    key = record_keys[packed_parent >> 32]
    if table == COUNTER_LEVELS[0].table:
        return key
    return child_record_key(key, packed_parent & LOW_32_BITS)
