"""Rows of live counters: their layout by level, and how events are added to them.

A row has the aggregates of the events of one key in one bucket of time: a second, a minute or an
hour. Rows of longer windows are merged from them, so nothing in a row depends on a request:

* `counts` of events and, for the mean dwell, `dwell_counts` and `dwell_ms`, which are integers;
* `last`, the second of the last event, for the time since;
* `decayed`, sums of 2^(-age / half-life) as of the bucket's last second. As of a later second each
  of them is multiplied by one weight.

Rows of seconds lack the last two, which follow from their bucket and counts.

N events, R rows, U counted types, S types of `last`, D types of dwells, H half-lives, T types of
decayed counts.
"""

from dataclasses import dataclass
from functools import cached_property
from struct import Struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from features.aggregations import NO_DWELL, Aggregations

Ints = npt.NDArray[np.int64]
LOW_32_BITS = (1 << 32) - 1
UINT32, UINT64, FLOAT64 = Struct("<I"), Struct("<Q"), Struct("<d")


class CounterLevel(NamedTuple):
    """A table of rows by bucket, and the length of a bucket in seconds.

    The record of a key in the first level holds all its hours. A record of a lower level holds the
    buckets within one bucket of the level above.
    """

    table: str
    bucket_seconds: int

    @property
    def is_lowest(self) -> bool:
        """Whether a bucket is a second."""
        return self.bucket_seconds == 1


COUNTER_LEVELS = (
    CounterLevel("hours", 3600),
    CounterLevel("minutes", 60),
    CounterLevel("seconds", 1),
)


def child_record_key(record_key: bytes, parent_bucket: int) -> bytes:
    """The key of the record that holds the buckets within a bucket of the level above."""
    return record_key + parent_bucket.to_bytes(4, "big")


class FieldUpdate(NamedTuple):
    """A change of one field of a row, at an offset in bytes: add an amount, or raise it to one."""

    number: Struct
    offset: int
    amount: float
    is_maximum: bool = False

    def apply(self, row: bytearray, start: int) -> None:
        """Change the row that starts at a byte of a record."""
        value = self.number.unpack_from(row, start + self.offset)[0]
        changed = max(value, self.amount) if self.is_maximum else value + self.amount
        self.number.pack_into(row, start + self.offset, changed)


@dataclass(frozen=True)
class RowLayout:
    """The rows of some aggregations."""

    aggregations: Aggregations

    @cached_property
    def counted_types(self) -> tuple[int, ...]:
        """Types of events whose numbers a row has: those of counts come first."""
        of = self.aggregations
        return tuple(dict.fromkeys((*of.count_types, *of.last_types)))

    @cached_property
    def event_types(self) -> frozenset[int]:
        """All types of events that change a row."""
        return frozenset((*self.counted_types, *self.aggregations.dwell_types))

    @cached_property
    def _dtypes(self) -> dict[str, np.dtype]:
        of, num_dwells = self.aggregations, (len(self.aggregations.dwell_types),)
        fields = [
            ("bucket", "<u4"),
            ("counts", "<u4", (len(self.counted_types),)),
            ("dwell_counts", "<u4", num_dwells),
            ("dwell_ms", "<u8", num_dwells),
        ]
        upper = [
            ("last", "<u4", (len(of.last_types),)),
            ("decayed", "<f8", (len(of.half_lives), len(of.count_types))),
        ]
        return {
            level.table: np.dtype(fields if level.is_lowest else fields + upper)
            for level in COUNTER_LEVELS
        }

    def dtype(self, level: CounterLevel) -> np.dtype:
        """The dtype of a row; `bucket` is the number of its bucket since 1970."""
        return self._dtypes[level.table]

    def updates(
        self, level: CounterLevel, second: int, event_type: int, dwell_ms: int
    ) -> list[FieldUpdate]:
        """What one event changes in the row of its bucket."""
        of, updates = self.aggregations, []
        if event_type in self.counted_types:
            index = self.counted_types.index(event_type)
            updates.append(FieldUpdate(UINT32, self._offset(level, "counts", index), 1))
        if event_type in of.dwell_types and dwell_ms != NO_DWELL:
            index = of.dwell_types.index(event_type)
            updates.append(FieldUpdate(UINT32, self._offset(level, "dwell_counts", index), 1))
            updates.append(FieldUpdate(UINT64, self._offset(level, "dwell_ms", index), dwell_ms))
        if level.is_lowest:
            return updates
        if event_type in of.last_types:
            index = of.last_types.index(event_type)
            updates.append(FieldUpdate(UINT32, self._offset(level, "last", index), second, True))
        if event_type in of.count_types:
            index = of.count_types.index(event_type)
            weights = decay_weights(_age_in_bucket(level, np.array([second])), of.half_lives)
            for row, weight in enumerate(weights[0].tolist()):
                index_of_row = row * len(of.count_types) + index
                offset = self._offset(level, "decayed", index_of_row)
                updates.append(FieldUpdate(FLOAT64, offset, weight))
        return updates

    def _offset(self, level: CounterLevel, field: str, index: int) -> int:
        dtype, start = self.dtype(level).fields[field][:2]  # type: ignore[index]
        return int(start + index * dtype.base.itemsize)

    def build_rows(
        self, level: CounterLevel, row: Ints, second: Ints, event_type: Ints, dwell_ms: Ints
    ) -> np.ndarray:
        """Rows (R) with N events added at once; `row` (N) is the row of each. Buckets are unset."""
        of, num_rows = self.aggregations, int(row.max(initial=-1)) + 1
        rows = np.zeros(num_rows, self.dtype(level))
        for index, type_ in enumerate(self.counted_types):
            rows["counts"][:, index] = np.bincount(row[event_type == type_], minlength=num_rows)
        for index, type_ in enumerate(of.dwell_types):
            is_added = (event_type == type_) & (dwell_ms != NO_DWELL)
            row_of, dwell = row[is_added], dwell_ms[is_added]
            rows["dwell_counts"][:, index] = np.bincount(row_of, minlength=num_rows)
            rows["dwell_ms"][:, index] = np.bincount(row_of, dwell, minlength=num_rows)
        if level.is_lowest:
            return rows
        for index, type_ in enumerate(of.last_types):
            last = np.zeros(num_rows, np.int64)
            np.maximum.at(last, row[event_type == type_], second[event_type == type_])
            rows["last"][:, index] = last
        for index, type_ in enumerate(of.count_types):
            row_of, age = (
                row[event_type == type_],
                _age_in_bucket(level, second[event_type == type_]),
            )
            weights = decay_weights(age, of.half_lives)
            for half_life in range(len(of.half_lives)):
                sums = np.bincount(row_of, weights[:, half_life], minlength=num_rows)
                rows["decayed"][:, half_life, index] = sums
        return rows


def decay_weights(ages: Ints, half_lives: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """2^(-age / half-life) of ages (n) in seconds: (n, H)."""
    return np.exp2(-ages[:, None] / np.array(half_lives, np.float64))


def _age_in_bucket(level: CounterLevel, second: Ints) -> Ints:
    """Seconds (N) from each second to the last one of its bucket."""
    return level.bucket_seconds - 1 - second % level.bucket_seconds
