"""Counters exact to the second, at a cost that does not grow with the number of events.

The events of a key are counted by hour, within each hour by minute, within each minute by second.
A count up to a second adds the hours before its hour, the minutes before its minute and the
seconds before it; a window is the difference of two such counts.

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
from ranking.online.database import Txn
from ranking.online.layout import UNKNOWN

SLACK = 2 * DAY  # by which a question may be older than the newest event
Ints = npt.NDArray[np.int64]
Pairs = list[tuple[bytes, bytes]]
UINT = Struct("<I")
LOW = (1 << 32) - 1


class Level(NamedTuple):
    """A table of rows by bucket, and the seconds of a bucket.

    A record of the first level has all hours of a key; one of the next level has the buckets
    within one bucket of the level before.
    """

    table: str
    seconds: int


LEVELS = (Level("hours", 3600), Level("minutes", 60), Level("seconds", 1))


def record_of(name: bytes, parent: int) -> bytes:
    """The key of the record of what lies within a bucket of the level before."""
    return name + parent.to_bytes(4, "big")


@dataclass(frozen=True)
class Counters:
    """Windows in seconds; `codes` of the types that are counted; `keys` as the spec names them."""

    windows: tuple[int, ...]
    codes: tuple[int, ...]
    keys: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, spec: DataSpec) -> "Counters":
        """The counters of a spec."""
        declared = spec.counters
        codes = tuple(spec.event_codes[event] for event in declared.events)
        return cls(declared.windows, codes, declared.keys)

    @property
    def width(self) -> int:
        """Counts of a key: types within windows."""
        return len(self.windows) * len(self.codes)

    @cached_property
    def row(self) -> np.dtype:
        """Number of a bucket since 1970, and its counts (T)."""
        return np.dtype([("bucket", "<u4"), ("counts", "<u4", (len(self.codes),))])

    @property
    def kept(self) -> int:
        """Seconds before now that a question may reach."""
        return max(self.windows) + SLACK

    def names(self, parts: Mapping[str, Ints]) -> list[list[bytes | None]]:
        """For each key of the spec the names (N) of its records; None where a part is unknown.

        `parts` (N) are the values of the single keys.
        """
        found = []
        for number, key in enumerate(self.keys):
            columns = np.stack([parts[part] for part in key], 1)
            known = (columns != UNKNOWN).all(1)
            names = zip(self.names_of(number, columns), known, strict=True)
            found.append([name if there else None for name, there in names])
        return found

    def names_of(self, number: int, values: Ints) -> list[bytes]:
        """Names of the records of values (N, parts) of a key, by its number in the spec."""
        size, raw = values.shape[1] * 8, values.astype(">i8").tobytes()
        head = bytes([number])
        return [head + raw[at : at + size] for at in range(0, len(raw), size)]

    def add(self, txn: Txn, names: Iterable[bytes], second: int, code: int, now: int) -> None:
        """Count an event of a type for some keys, and drop what no question from `now` on reads."""
        if code not in self.codes:
            return
        type_ = self.codes.index(code)
        for name in names:
            record = name
            for table, seconds in LEVELS:
                bucket = second // seconds
                rows = self._incremented(txn.get(table, record), bucket, type_)
                txn.put(table, record, rows)
                record = record_of(name, bucket)
            self._drop_old(txn, name, (now - self.kept) // LEVELS[0].seconds)

    def _incremented(self, record: bytes, bucket: int, type_: int) -> bytes:
        """The rows of a record after one more event in a bucket."""
        size = self.row.itemsize
        buckets = range(len(record) // size)
        place = size * bisect_left(
            buckets, bucket, key=lambda row: UINT.unpack_from(record, row * size)[0]
        )
        rows = bytearray(record)
        if place == len(rows) or UINT.unpack_from(rows, place)[0] != bucket:
            rows[place:place] = UINT.pack(bucket).ljust(size, b"\0")
        at = place + UINT.size * (1 + type_)
        UINT.pack_into(rows, at, UINT.unpack_from(rows, at)[0] + 1)
        return bytes(rows)

    def _drop_old(self, txn: Txn, name: bytes, first: int) -> None:
        """Remove a key's hours before the hour `first`."""
        hours = txn.get("hours", name)
        if UINT.unpack_from(hours)[0] >= first:
            return
        rows = np.frombuffer(hours, self.row)
        old = int(np.searchsorted(rows["bucket"], first))
        for hour in rows["bucket"][:old].tolist():
            record = record_of(name, hour)
            for minute in np.frombuffer(txn.get("minutes", record), self.row)["bucket"].tolist():
                txn.delete("seconds", record_of(name, minute))
            txn.delete("minutes", record)
        txn.put("hours", name, rows[old:].tobytes())

    def records(
        self, parts: Mapping[str, Ints], second: Ints, type_: Ints
    ) -> Iterator[tuple[str, Pairs]]:
        """All records of events (N), table by table: single keys, seconds, types by their numbers.

        Keys of the spec of which a part is not given are left out.
        """
        for number, key in enumerate(self.keys):
            if not set(key) <= set(parts):
                continue
            columns = np.stack([parts[part] for part in key], 1)
            there = (columns != UNKNOWN).all(1)
            values, owner = np.unique(columns[there], axis=0, return_inverse=True)
            names = self.names_of(number, values)
            yield from self._records_of(names, owner.ravel(), second[there], type_[there])

    def _records_of(
        self, names: Sequence[bytes], key: Ints, second: Ints, type_: Ints
    ) -> Iterator[tuple[str, Pairs]]:
        """The records of N events of one key of the spec, of values by their number in `names`."""
        if not len(key):
            return
        parents = key << 32
        for table, seconds in LEVELS:
            places, row = np.unique((key << 32) + second // seconds, return_inverse=True)
            rows = np.zeros(len(places), self.row)
            rows["bucket"] = places & LOW
            cells = row.ravel() * len(self.codes) + type_
            counts = np.bincount(cells, minlength=rows["counts"].size)
            rows["counts"] = counts.reshape(rows["counts"].shape)
            parent = np.zeros(len(places), np.int64)
            parent[row.ravel()] = parents
            starts = np.flatnonzero(np.diff(parent, prepend=-1))
            ends = np.append(starts[1:], len(rows))
            cuts = zip(starts.tolist(), ends.tolist(), strict=True)
            found = [(_named(names, table, int(parent[a])), rows[a:b].tobytes()) for a, b in cuts]
            yield table, found
            parents = (key << 32) + second // seconds

    def count(self, txn: Txn, names: Sequence[bytes], as_of: int) -> Ints:
        """Events of keys (Q) in [as_of - window, as_of), by window and type (Q, W * T)."""
        until = self._before(txn, names, np.maximum(as_of - np.array([0, *self.windows]), 0))
        within = until[0] - until[1:]
        return within.transpose(1, 0, 2).reshape(len(names), self.width)

    def _before(self, txn: Txn, names: Sequence[bytes], points: Ints) -> Ints:
        """Kept events of keys before each of some seconds (P, Q, T)."""
        found = np.zeros((len(points), len(names), len(self.codes)), np.int64)
        point, key = (axis.ravel() for axis in np.indices(found.shape[:2]))
        records, record = list(names), key
        for table, seconds in LEVELS:
            rows = Rows.of(txn.many(table, records), self.row)
            bucket = points[point] // seconds
            sums, inside = rows.before(record, bucket)
            found[point, key] += sums
            point, key, bucket = point[inside], key[inside], bucket[inside]
            if not len(point):
                break
            distinct, record = np.unique((key << 32) + bucket, return_inverse=True)
            records = [record_of(names[one >> 32], one & LOW) for one in distinct.tolist()]
        return found


def _named(names: Sequence[bytes], table: str, parent: int) -> bytes:
    name = names[parent >> 32]
    return name if table == LEVELS[0].table else record_of(name, parent & LOW)


@dataclass(frozen=True)
class Rows:
    """The rows of some records behind each other: (record, bucket) of each, counts summed up."""

    places: Ints
    so_far: Ints

    @classmethod
    def of(cls, records: Sequence[bytes], row: np.dtype) -> "Rows":
        """The rows (N) of records, each by bucket; counts so far (N + 1, T)."""
        rows = np.frombuffer(b"".join(records), row)
        sizes = np.array([len(record) // row.itemsize for record in records], np.int64)
        owner = np.repeat(np.arange(len(records)), sizes)
        so_far = np.zeros((len(rows) + 1, rows["counts"].shape[1]), np.int64)
        np.cumsum(rows["counts"], 0, out=so_far[1:])
        return cls((owner << 32) + rows["bucket"], so_far)

    def before(self, record: Ints, bucket: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Counts before a bucket of each of some records (n, T); whether it has that bucket (n)."""
        place = (record << 32) + bucket
        first, until = (np.searchsorted(self.places, at) for at in (record << 32, place))
        there = np.append(self.places, -1)[until] == place
        return self.so_far[until] - self.so_far[first], there
