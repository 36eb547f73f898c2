"""Rows of live counters: their layout by level, and how events are added to them.

A row has the aggregates of the events of one key in one bucket of time: a second, a minute or an
hour. Rows of longer windows are merged from them, so nothing in a row depends on a request:

* `counts` of events;
* of each number of which functions are computed, such as the dwell of views: how many there are,
  their sum, and where needed the smallest and the largest, in fixed point;
* the `first` and the `last` of these numbers, where needed, each with its second;
* the HyperLogLog `registers` of distinct counts;
* `last_event`, the second of the last event, for the time since;
* `decayed`, sums of 2^(-age / half-life) as of the bucket's last second. As of a later second each
  of them is multiplied by one weight.

Rows of seconds lack first and last numbers, last events and decayed counts, which follow from their
bucket and other fields.

N events, R rows, U counted types, S types of `last_event`, P numbers, D distinct counts, H
half-lives, T types of decayed counts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from struct import Struct
from typing import NamedTuple

import numpy as np

from etl.array_types import Bools, Float64, Int64
from etl.spec.counters import Function
from features.counters.aggregations import Aggregations, NumberInput
from features.counters.distinct_counts import MISSING_ENTRY, NUM_REGISTERS, RANKS
from features.counters.numeric_columns import MISSING

LOW_32_BITS = (1 << 32) - 1
LARGEST_INT64 = (1 << 63) - 1
UINT8, UINT32, INT64 = Struct("<B"), Struct("<I"), Struct("<q")
FLOAT64, TIMED = Struct("<d"), Struct("<Iq")
TIMED_NUMBER = np.dtype([("second", "<u4"), ("number", "<i8")])


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


@dataclass(frozen=True)
class CountedEvents:
    """Events (N) to count.

    Attributes:
        epoch_seconds: When they became visible.
        types: Their types as codes.
        numbers: Their numbers in fixed point by column; MISSING where unknown.
        entries: Their entries of distinct counts by the part of keys; MISSING_ENTRY where unknown.
    """

    epoch_seconds: Int64
    types: Int64
    numbers: Mapping[str, Int64]
    entries: Mapping[str, Int64]

    def __getitem__(self, selected: Bools) -> "CountedEvents":
        """Some of the events."""
        numbers = {name: column[selected] for name, column in self.numbers.items()}
        entries = {name: column[selected] for name, column in self.entries.items()}
        return CountedEvents(self.epoch_seconds[selected], self.types[selected], numbers, entries)


class FieldUpdate(NamedTuple):
    """A change of one field of a row, at an offset in bytes: its value is merged with another."""

    struct: Struct
    offset: int
    values: tuple[float, ...]
    merge: Callable[[tuple[float, ...], tuple[float, ...]], tuple[float, ...]]

    def apply(self, row: bytearray, start: int) -> None:
        """Change the row that starts at a byte of a record."""
        stored = self.struct.unpack_from(row, start + self.offset)
        self.struct.pack_into(row, start + self.offset, *self.merge(stored, self.values))


def _add(stored: tuple[float, ...], values: tuple[float, ...]) -> tuple[float, ...]:
    return (stored[0] + values[0],)


def _add_wrapping(stored: tuple[int, ...], values: tuple[int, ...]) -> tuple[int, ...]:
    """Add 64-bit integers as NumPy does, which wrap."""
    return ((stored[0] + values[0] - MISSING) % (1 << 64) + MISSING,)


@dataclass(frozen=True)
class RowLayout:
    """The rows of some aggregations."""

    aggregations: Aggregations

    @cached_property
    def counted_types(self) -> tuple[int, ...]:
        """Types of events whose counts a row has: those of counters come first."""
        of = self.aggregations
        return tuple(dict.fromkeys((*of.count_types, *of.last_types)))

    @cached_property
    def event_types(self) -> frozenset[int]:
        """All types of events that change a row."""
        return self.aggregations.all_types

    @cached_property
    def numbers(self) -> tuple[NumberInput, ...]:
        """The numbers (P) of which a row has the sum."""
        return self.numbers_of("sum", "mean", "min", "max", "first", "last")

    def numbers_of(self, *functions: Function) -> tuple[NumberInput, ...]:
        """The numbers of which some functions are computed."""
        numeric = [each for each in self.aggregations.numeric if each.function in functions]
        return tuple(dict.fromkeys(each.input for each in numeric))

    @cached_property
    def fields(self) -> Mapping[str, tuple[NumberInput, ...]]:
        """The numbers that each field of extremes has."""
        return {
            "smallest": self.numbers_of("min", "first"),
            "largest": self.numbers_of("max", "last"),
            "first": self.numbers_of("first"),
            "last": self.numbers_of("last"),
        }

    @cached_property
    def _dtypes(self) -> dict[str, np.dtype]:
        of = self.aggregations
        fields = [
            ("bucket", "<u4"),
            ("counts", "<u4", (len(self.counted_types),)),
            ("number_counts", "<u4", (len(self.numbers),)),
            ("number_sums", "<i8", (len(self.numbers),)),
            ("smallest", "<i8", (len(self.fields["smallest"]),)),
            ("largest", "<i8", (len(self.fields["largest"]),)),
            ("registers", "u1", (len(of.distinct), NUM_REGISTERS)),
        ]
        upper = [
            ("first", TIMED_NUMBER, (len(self.fields["first"]),)),
            ("last", TIMED_NUMBER, (len(self.fields["last"]),)),
            ("last_event", "<u4", (len(of.last_types),)),
            ("decayed", "<f8", (len(of.half_lives), len(of.count_types))),
        ]
        return {
            level.table: np.dtype(fields if level.is_lowest else fields + upper)
            for level in COUNTER_LEVELS
        }

    def dtype(self, level: CounterLevel) -> np.dtype:
        """The dtype of a row; `bucket` is the number of its bucket since 1970."""
        return self._dtypes[level.table]

    @cached_property
    def _empty_rows(self) -> dict[str, bytes]:
        return {level.table: self.empty_rows(level, 1).tobytes() for level in COUNTER_LEVELS}

    def empty_row(self, level: CounterLevel, bucket: int) -> bytes:
        """A row without events."""
        return UINT32.pack(bucket) + self._empty_rows[level.table][UINT32.size :]

    def empty_rows(self, level: CounterLevel, num_rows: int) -> np.ndarray:
        """Rows (R) without events: extremes have the values that any number replaces."""
        rows = np.zeros(num_rows, self.dtype(level))
        rows["smallest"], rows["largest"] = LARGEST_INT64, MISSING
        if not level.is_lowest:
            rows["first"]["second"], rows["first"]["number"] = LOW_32_BITS, LARGEST_INT64
            rows["last"]["number"] = MISSING
        return rows

    def updates(self, level: CounterLevel, event: CountedEvents) -> list[FieldUpdate]:
        """What one event (N = 1) changes in the row of its bucket."""
        second, event_type = int(event.epoch_seconds[0]), int(event.types[0])
        of, updates = self.aggregations, []
        if event_type in self.counted_types:
            index = self.counted_types.index(event_type)
            updates.append(self._update(level, "counts", index, UINT32, (1,), _add))
        for of_event in self.numbers:
            number = int(event.numbers[of_event.column][0])
            if of_event.event_type == event_type and number != MISSING:
                updates += self._number_updates(level, second, of_event, number)
        for index, distinct in enumerate(of.distinct):
            entry = int(event.entries[distinct.column][0])
            if distinct.event_type == event_type and entry != MISSING_ENTRY:
                register, rank = divmod(entry, RANKS)
                position = index * NUM_REGISTERS + register
                updates.append(self._update(level, "registers", position, UINT8, (rank,), max))
        if level.is_lowest:
            return updates
        if event_type in of.last_types:
            index = of.last_types.index(event_type)
            updates.append(self._update(level, "last_event", index, UINT32, (second,), max))
        if event_type in of.count_types:
            index = of.count_types.index(event_type)
            weights = decay_weights(_age_in_bucket(level, np.array([second])), of.half_lives)
            for row, weight in enumerate(weights[0].tolist()):
                position = row * len(of.count_types) + index
                updates.append(self._update(level, "decayed", position, FLOAT64, (weight,), _add))
        return updates

    def _number_updates(
        self, level: CounterLevel, second: int, of: NumberInput, number: int
    ) -> list[FieldUpdate]:
        """What a number of an event changes in the row of its bucket."""
        index = self.numbers.index(of)
        updates = [
            self._update(level, "number_counts", index, UINT32, (1,), _add),
            self._update(level, "number_sums", index, INT64, (number,), _add_wrapping),
        ]
        extremes: list[tuple[str, Struct, tuple[int, ...], Callable[..., tuple[float, ...]]]]
        extremes = [("smallest", INT64, (number,), min), ("largest", INT64, (number,), max)]
        if not level.is_lowest:
            timed = (second, number)
            extremes += [("first", TIMED, timed, min), ("last", TIMED, timed, max)]
        for field, struct, values, merge in extremes:
            if of in self.fields[field]:
                index = self.fields[field].index(of)
                updates.append(self._update(level, field, index, struct, values, merge))
        return updates

    def _update(
        self,
        level: CounterLevel,
        field: str,
        index: int,
        struct: Struct,
        values: tuple[float, ...],
        merge: Callable[..., tuple[float, ...]],
    ) -> FieldUpdate:
        dtype, start = self.dtype(level).fields[field][:2]  # type: ignore[index]
        return FieldUpdate(struct, int(start + index * dtype.base.itemsize), values, merge)

    def build_rows(self, level: CounterLevel, row: Int64, events: CountedEvents) -> np.ndarray:
        """Rows (R) with N events added at once; `row` (N) is the row of each. Buckets are unset."""
        num_rows = int(row.max(initial=-1)) + 1
        rows = self.empty_rows(level, num_rows)
        for index, type_ in enumerate(self.counted_types):
            is_added = events.types == type_
            rows["counts"][:, index] = np.bincount(row[is_added], minlength=num_rows)
        for index, of in enumerate(self.numbers):
            number = events.numbers[of.column]
            is_added = (events.types == of.event_type) & (number != MISSING)
            counts = np.bincount(row[is_added], minlength=num_rows)
            rows["number_counts"][:, index] = counts
            np.add.at(rows["number_sums"][:, index], row[is_added], number[is_added])
            self._add_extremes(rows, level, of, row[is_added], events[is_added])
        for index, distinct in enumerate(self.aggregations.distinct):
            entry = events.entries[distinct.column]
            is_added = (events.types == distinct.event_type) & (entry != MISSING_ENTRY)
            register, rank = np.divmod(entry[is_added], RANKS)
            registers = rows["registers"][:, index]
            np.maximum.at(registers, (row[is_added], register), rank.astype(np.uint8))
        if not level.is_lowest:
            self._add_last_events(rows, row, events)
            self._add_decayed(rows, level, row, events)
        return rows

    def _add_extremes(
        self,
        rows: np.ndarray,
        level: CounterLevel,
        of: NumberInput,
        row: Int64,
        events: CountedEvents,
    ) -> None:
        """Set the extremes of a number that N events have; `row` (N) is the row of each."""
        number = events.numbers[of.column]
        for field, extreme in (("smallest", np.minimum), ("largest", np.maximum)):
            if of in self.fields[field]:
                extreme.at(rows[field][:, self.fields[field].index(of)], row, number)
        for field in ("first", "last"):
            if level.is_lowest or of not in self.fields[field]:
                continue
            order = np.lexsort((number, events.epoch_seconds, row))
            # Of repeated rows, the assignment keeps the last.
            order = order[::-1] if field == "first" else order
            timed = rows[field][:, self.fields[field].index(of)]
            timed["second"][row[order]] = events.epoch_seconds[order]
            timed["number"][row[order]] = number[order]

    def _add_last_events(self, rows: np.ndarray, row: Int64, events: CountedEvents) -> None:
        for index, type_ in enumerate(self.aggregations.last_types):
            is_added = events.types == type_
            last = np.zeros(len(rows), np.int64)
            np.maximum.at(last, row[is_added], events.epoch_seconds[is_added])
            rows["last_event"][:, index] = last

    def _add_decayed(
        self, rows: np.ndarray, level: CounterLevel, row: Int64, events: CountedEvents
    ) -> None:
        half_lives = self.aggregations.half_lives
        for index, type_ in enumerate(self.aggregations.count_types):
            is_added = events.types == type_
            age = _age_in_bucket(level, events.epoch_seconds[is_added])
            weights = decay_weights(age, half_lives)
            for half_life in range(len(half_lives)):
                sums = np.bincount(row[is_added], weights[:, half_life], minlength=len(rows))
                rows["decayed"][:, half_life, index] = sums


def decay_weights(ages: Int64, half_lives: tuple[int, ...]) -> Float64:
    """2^(-age / half-life) of ages (n) in seconds: (n, H)."""
    return np.exp2(-ages[:, None] / np.array(half_lives, np.float64))


def _age_in_bucket(level: CounterLevel, second: Int64) -> Int64:
    """Seconds (N) from each second to the last one of its bucket."""
    return level.bucket_seconds - 1 - second % level.bucket_seconds
