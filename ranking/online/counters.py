"""Counters exact to the second: whole hours as totals, the edges of windows event by event.

N events, Q questions, T event types, W windows. A key is the bytes of its place in the spec and of
its values; each has a record of totals by hour, and one for each hour.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lmdb
import numpy as np
import numpy.typing as npt

from etl.spec.model import DataSpec
from etl.spec.units import DAY
from ranking.online.layout import HOUR, UNKNOWN

SECONDS = 3600
SLACK = 2 * DAY  # by which a question may be older than the newest event
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Counters:
    """Windows in seconds; `codes` of the types that are counted; `keys` as the spec names them."""

    windows: tuple[int, ...]
    codes: tuple[int, ...]
    keys: tuple[tuple[str, ...], ...]
    totals: np.dtype

    @classmethod
    def of(cls, spec: DataSpec, totals: np.dtype) -> "Counters":
        """The counters of a spec."""
        told = spec.counters
        codes = tuple(spec.event_codes[event] for event in told.events)
        return cls(told.windows, codes, told.keys, totals)

    @property
    def width(self) -> int:
        """Counts of a key: types within windows."""
        return len(self.windows) * len(self.codes)

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

    def add(self, db: "Records", names: Iterable[bytes], second: int, code: int) -> None:
        """Count an event of a type for some keys."""
        if code not in self.codes:
            return
        type_, (hour, rest) = self.codes.index(code), divmod(second, SECONDS)
        event = np.array([(rest, type_)], HOUR).tobytes()
        for name in names:
            totals = np.frombuffer(db.totals(name), self.totals).copy()
            at = int(np.searchsorted(totals["hour"], hour))
            if at == len(totals) or totals["hour"][at] != hour:
                totals = np.insert(totals, at, np.zeros(1, self.totals))
                totals["hour"][at] = hour
            totals["counts"][at, type_] += 1
            kept = hour - (max(self.windows) + SLACK) // SECONDS
            oldest = int(np.searchsorted(totals["hour"], kept))
            db.put_totals(name, totals[oldest:].tobytes())
            db.drop_hours(name, totals["hour"][:oldest].tolist())
            db.append_hour(name, hour, event)

    def count(self, db: "Records", names: Sequence[bytes], as_of: int) -> Ints:
        """Events of keys (Q) in [as_of - window, as_of), by window and type (Q, W * T)."""
        last, first = as_of // SECONDS, [(as_of - w) // SECONDS for w in self.windows]
        totals, owner = self._totals(db, names)
        edge = np.isin(totals["hour"], [last, *first])
        hours, seconds, kinds = self._edges(db, names, owner[edge], totals["hour"][edge])
        shape = len(names), len(self.codes)
        found = np.empty((shape[0], len(self.windows), shape[1]), np.int64)
        sums = Sums.of(totals, owner)
        for n, (window, begin) in enumerate(zip(self.windows, first, strict=True)):
            inside = ((hours == begin) | (hours == last)) & (seconds >= as_of - window)
            at_edges = np.bincount(kinds[inside & (seconds < as_of)], minlength=shape[0] * shape[1])
            found[:, n] = sums.between(begin, last, shape[0]) + at_edges.reshape(shape)
        return found.reshape(len(names), self.width)

    def _totals(self, db: "Records", names: Sequence[bytes]) -> tuple[np.ndarray, Ints]:
        """Rows of totals, by hour within keys, and the key of each."""
        records = db.many_totals(names)
        sizes = [len(record) // self.totals.itemsize for record in records]
        rows = np.frombuffer(b"".join(records), self.totals)
        return rows, np.repeat(np.arange(len(names)), sizes)

    def _edges(
        self, db: "Records", names: Sequence[bytes], owner: Ints, hours: Ints
    ) -> tuple[Ints, Ints, Ints]:
        """Hour, second, and key and type as one number, of each event of some hours of keys."""
        records = db.many_hours(
            [(names[key], hour) for key, hour in zip(owner, hours.tolist(), strict=True)]
        )
        sizes = [len(record) // HOUR.itemsize for record in records]
        rows = np.frombuffer(b"".join(records), HOUR)
        hour = np.repeat(hours.astype(np.int64), sizes)
        kind = np.repeat(owner, sizes) * len(self.codes) + rows["type"]
        return hour, hour * SECONDS + rows["second"], kind


@dataclass(frozen=True)
class Sums:
    """Totals of keys by hour, summed up (rows + 1, T); `places` (rows) are of key and hour."""

    places: Ints
    so_far: Ints

    @classmethod
    def of(cls, totals: np.ndarray, owner: Ints) -> "Sums":
        """Of rows of totals, by hour within keys."""
        so_far = np.zeros((len(totals) + 1, totals["counts"].shape[1]), np.int64)
        np.cumsum(totals["counts"], 0, out=so_far[1:])
        return cls((owner << 32) + totals["hour"], so_far)

    def between(self, begin: int, last: int, keys: int) -> Ints:
        """Counts (keys, T) in the hours after `begin` and before `last`."""
        key = np.arange(keys) << 32
        start, stop = (np.searchsorted(self.places, key + hour) for hour in (begin + 1, last))
        return self.so_far[np.maximum(start, stop)] - self.so_far[start]


@dataclass(frozen=True)
class Records:
    """The records of counters in a transaction of the store."""

    transaction: lmdb.Transaction
    by_key: Any
    by_hour: Any

    def totals(self, name: bytes) -> bytes:
        """Totals by hour of a key; nothing where it was never counted."""
        return bytes(self.transaction.get(name, b"", db=self.by_key))

    def put_totals(self, name: bytes, value: bytes) -> None:
        """Replace the totals of a key."""
        self.transaction.put(name, value, db=self.by_key)

    def append_hour(self, name: bytes, hour: int, event: bytes) -> None:
        """Add an event to an hour of a key."""
        place = name + hour.to_bytes(4, "big")
        there = self.transaction.get(place, b"", db=self.by_hour)
        self.transaction.put(place, bytes(there) + event, db=self.by_hour)

    def drop_hours(self, name: bytes, hours: Sequence[int]) -> None:
        """Forget hours of a key that no window reaches."""
        for hour in hours:
            self.transaction.delete(name + hour.to_bytes(4, "big"), db=self.by_hour)

    def many_totals(self, names: Sequence[bytes]) -> list[bytes]:
        """Totals of several keys, in their order."""
        return self._many(names, self.by_key)

    def many_hours(self, places: Sequence[tuple[bytes, int]]) -> list[bytes]:
        """Several hours of keys, in their order."""
        return self._many([name + hour.to_bytes(4, "big") for name, hour in places], self.by_hour)

    def _many(self, names: Sequence[bytes], db: Any) -> list[bytes]:
        with self.transaction.cursor(db) as cursor:
            there = dict(cursor.getmulti(names))
        return [bytes(there.get(name, b"")) for name in names]
