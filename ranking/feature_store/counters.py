"""Windowed event counters that are exact to the second, as prefix sums with edge hours.

The number of events of a key in [as_of - window, as_of) is the difference of two prefix sums: the
events before `as_of` less those before `as_of - window`. A prefix sum up to a second is read from
three levels of records, without touching single events:

* `hours`: one record per key; the cumulative sum of all whole hours before the second.
* `minutes`: one record per key and hour. Only that of the edge hour, which contains the second, is
  read: its whole minutes before the second.
* `seconds`: one record per key and minute. Only that of the edge minute is read.

A record of the lower levels has at most 60 rows, and one of the first level has the hours of the
longest window. The cost of counting an event or reading a window therefore does not grow with the
number of events, and no window is rounded to a bucket.

P points in time, Q keys, N rows, T event types, W windows.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from struct import Struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from etl.spec.model import DataSpec
from etl.spec.units import DAY
from ranking.feature_store.storage import UNKNOWN, Txn

MAX_REQUEST_LAG = 2 * DAY  # seconds by which a request may be older than the most recent event
Ints = npt.NDArray[np.int64]
KeyValuePairs = list[tuple[bytes, bytes]]
UINT32 = Struct("<I")
LOW_32_BITS = (1 << 32) - 1


class CounterLevel(NamedTuple):
    """A table of rows by bucket, and the length of a bucket in seconds.

    The record of a key in the first level holds all its hours. A record of a lower level holds the
    buckets within one bucket of the level above.
    """

    table: str
    bucket_seconds: int


COUNTER_LEVELS = (
    CounterLevel("hours", 3600),
    CounterLevel("minutes", 60),
    CounterLevel("seconds", 1),
)


def child_record_key(record_key: bytes, parent_bucket: int) -> bytes:
    """The key of the record that holds the buckets within a bucket of the level above."""
    return record_key + parent_bucket.to_bytes(4, "big")


@dataclass(frozen=True)
class Counters:
    """The counters of a spec: windows in seconds, codes of the counted event types, key columns."""

    windows: tuple[int, ...]
    event_codes: tuple[int, ...]
    key_columns: tuple[tuple[str, ...], ...]

    @classmethod
    def from_spec(cls, spec: DataSpec) -> "Counters":
        """The counters that a spec declares."""
        declared = spec.counters
        codes = tuple(spec.event_codes[event] for event in declared.events)
        return cls(declared.windows, codes, declared.keys)

    @property
    def width(self) -> int:
        """The number of counts of a key: windows times event types."""
        return len(self.windows) * len(self.event_codes)

    @cached_property
    def row_dtype(self) -> np.dtype:
        """A row of a record: the number of its bucket since 1970, and its counts (T)."""
        return np.dtype([("bucket", "<u4"), ("counts", "<u4", (len(self.event_codes),))])

    @property
    def retention_seconds(self) -> int:
        """How long events are kept: the longest window, and the lag allowed for a request."""
        return max(self.windows) + MAX_REQUEST_LAG

    def record_keys(self, key_values: Mapping[str, Ints]) -> list[list[bytes | None]]:
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

    def encode_record_keys(self, key_index: int, values: Ints) -> list[bytes]:
        """The record keys of values (N, columns) of a counter key, given by its index."""
        size, raw = values.shape[1] * 8, values.astype(">i8").tobytes()
        prefix = bytes([key_index])
        return [prefix + raw[start : start + size] for start in range(0, len(raw), size)]

    def increment(
        self, txn: Txn, record_keys: Iterable[bytes], epoch_second: int, event_code: int, now: int
    ) -> None:
        """Count one event for some keys, and drop the hours that no request after `now` reads."""
        if event_code not in self.event_codes:
            return
        type_index = self.event_codes.index(event_code)
        first_hour = (now - self.retention_seconds) // COUNTER_LEVELS[0].bucket_seconds
        for key in record_keys:
            level_key = key
            for table, bucket_seconds in COUNTER_LEVELS:
                bucket = epoch_second // bucket_seconds
                rows = self._increment_bucket(txn.get(table, level_key), bucket, type_index)
                txn.put(table, level_key, rows)
                level_key = child_record_key(key, bucket)
            self._drop_expired(txn, key, first_hour)

    def _increment_bucket(self, record: bytes, bucket: int, type_index: int) -> bytes:
        """A record after one more event in a bucket; its rows stay sorted by bucket."""
        row_size = self.row_dtype.itemsize

        def bucket_of_row(row: int) -> int:
            return int(UINT32.unpack_from(record, row * row_size)[0])

        num_rows = len(record) // row_size
        row = bisect_left(range(num_rows), bucket, key=bucket_of_row)
        updated = bytearray(record)
        if row == num_rows or bucket_of_row(row) != bucket:
            start = row * row_size
            updated[start:start] = UINT32.pack(bucket).ljust(row_size, b"\0")
        count_offset = row * row_size + UINT32.size * (1 + type_index)
        UINT32.pack_into(updated, count_offset, UINT32.unpack_from(updated, count_offset)[0] + 1)
        return bytes(updated)

    def _drop_expired(self, txn: Txn, record_key: bytes, first_hour: int) -> None:
        """Remove a key's hours before `first_hour`, and the minutes and seconds within them."""
        hours = txn.get("hours", record_key)
        if UINT32.unpack_from(hours)[0] >= first_hour:
            return
        rows = np.frombuffer(hours, self.row_dtype)
        num_expired = int(np.searchsorted(rows["bucket"], first_hour))
        for hour in rows["bucket"][:num_expired].tolist():
            minutes_key = child_record_key(record_key, hour)
            minutes = np.frombuffer(txn.get("minutes", minutes_key), self.row_dtype)["bucket"]
            for minute in minutes.tolist():
                txn.delete("seconds", child_record_key(record_key, minute))
            txn.delete("minutes", minutes_key)
        txn.put("hours", record_key, rows[num_expired:].tobytes())

    def build_records(
        self, key_values: Mapping[str, Ints], epoch_seconds: Ints, type_index: Ints
    ) -> Iterator[tuple[str, KeyValuePairs]]:
        """All records of N events at once, as `increment` would write them one by one.

        Args:
            key_values: The values (N) of key columns. Counter keys with other columns are skipped.
            epoch_seconds: The seconds (N) at which the events count.
            type_index: Their event types (N), as positions in `event_codes`.

        Yields:
            The name of a table, and keys and values to write into it.
        """
        for key_index, columns in enumerate(self.key_columns):
            if not set(columns) <= set(key_values):
                continue
            values = np.stack([key_values[column] for column in columns], 1)
            is_known = (values != UNKNOWN).all(1)
            distinct, value_index = np.unique(values[is_known], axis=0, return_inverse=True)
            yield from self._build_key_records(
                self.encode_record_keys(key_index, distinct),
                value_index.ravel(),
                epoch_seconds[is_known],
                type_index[is_known],
            )

    def _build_key_records(
        self, record_keys: Sequence[bytes], value_index: Ints, epoch_seconds: Ints, type_index: Ints
    ) -> Iterator[tuple[str, KeyValuePairs]]:
        """The records of N events of one counter key; `value_index` points into `record_keys`."""
        if not len(value_index):
            return
        parents = value_index << 32  # record key and bucket of the level above, packed
        for table, bucket_seconds in COUNTER_LEVELS:
            buckets = (value_index << 32) + epoch_seconds // bucket_seconds
            distinct, row = np.unique(buckets, return_inverse=True)
            row = row.ravel()
            rows = np.zeros(len(distinct), self.row_dtype)
            rows["bucket"] = distinct & LOW_32_BITS
            cells = row * len(self.event_codes) + type_index
            counts = np.bincount(cells, minlength=rows["counts"].size)
            rows["counts"] = counts.reshape(rows["counts"].shape)
            parent_of_row = np.zeros(len(distinct), np.int64)
            parent_of_row[row] = parents
            starts = np.flatnonzero(np.diff(parent_of_row, prepend=-1))
            stops = np.append(starts[1:], len(rows))
            pairs = []
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
                key = _record_key(record_keys, table, int(parent_of_row[start]))
                pairs.append((key, rows[start:stop].tobytes()))
            yield table, pairs
            parents = buckets

    def window_counts(self, txn: Txn, record_keys: Sequence[bytes], as_of: int) -> Ints:
        """Events of keys (Q) in [as_of - window, as_of), by window and type (Q, W * T).

        Each window is the difference of the prefix sums at its two ends.
        """
        edges = np.maximum(as_of - np.array([0, *self.windows]), 0)
        prefix_sums = self._counts_before(txn, record_keys, edges)
        counts = prefix_sums[0] - prefix_sums[1:]
        return np.asarray(counts.transpose(1, 0, 2).reshape(len(record_keys), self.width))

    def _counts_before(self, txn: Txn, record_keys: Sequence[bytes], epoch_seconds: Ints) -> Ints:
        """Prefix sums (P, Q, T): the retained events of keys before each of some seconds.

        All pairs of a second and a key go down the levels together. A pair stays as long as its
        record has a row for the edge bucket, which contains its second; the next level splits it.
        """
        shape = (len(epoch_seconds), len(record_keys), len(self.event_codes))
        sums = np.zeros(shape, np.int64)
        point, key = (axis.ravel() for axis in np.indices(sums.shape[:2]))
        records, record = list(record_keys), key
        for table, bucket_seconds in COUNTER_LEVELS:
            rows = CounterRows.from_records(txn.get_many(table, records), self.row_dtype)
            bucket = epoch_seconds[point] // bucket_seconds
            before, has_edge = rows.counts_before(record, bucket)
            sums[point, key] += before
            point, key, bucket = point[has_edge], key[has_edge], bucket[has_edge]
            if not len(point):
                break
            distinct, record = np.unique((key << 32) + bucket, return_inverse=True)
            records = [
                child_record_key(record_keys[packed >> 32], packed & LOW_32_BITS)
                for packed in distinct.tolist()
            ]
        return sums


def _record_key(record_keys: Sequence[bytes], table: str, packed_parent: int) -> bytes:
    key = record_keys[packed_parent >> 32]
    if table == COUNTER_LEVELS[0].table:
        return key
    return child_record_key(key, packed_parent & LOW_32_BITS)


@dataclass(frozen=True)
class CounterRows:
    """The concatenated rows (N) of several records.

    `record_buckets` (N) packs the index of a row's record and its bucket; `cumulative_counts`
    (N + 1, T) are the counts of all rows before each row.
    """

    record_buckets: Ints
    cumulative_counts: Ints

    @classmethod
    def from_records(cls, records: Sequence[bytes], row_dtype: np.dtype) -> "CounterRows":
        """Concatenate records, whose rows are sorted by bucket."""
        rows = np.frombuffer(b"".join(records), row_dtype)
        sizes = np.array([len(record) // row_dtype.itemsize for record in records], np.int64)
        record_index = np.repeat(np.arange(len(records)), sizes)
        cumulative_counts = np.zeros((len(rows) + 1, rows["counts"].shape[1]), np.int64)
        np.cumsum(rows["counts"], 0, out=cumulative_counts[1:])
        return cls((record_index << 32) + rows["bucket"], cumulative_counts)

    def counts_before(self, record: Ints, bucket: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Counts (n, T) before a bucket of each of n records; whether it has that bucket (n)."""
        target = (record << 32) + bucket
        first = np.searchsorted(self.record_buckets, record << 32)
        stop = np.searchsorted(self.record_buckets, target)
        has_bucket = np.append(self.record_buckets, -1)[stop] == target
        return self.cumulative_counts[stop] - self.cumulative_counts[first], has_bucket
