"""Reads the counters of keys as of a second from the rows of three levels.

Integers are prefix sums: the events before `as_of` less those before `as_of - window`. A prefix sum
up to a second is the sum of all whole hours before it, of the whole minutes before it in the edge
hour, which contains it, and of the seconds before it in the edge minute.

Decayed counts are not subtracted, because a small difference of large sums is inexact. They add up
the largest buckets that lie within the longest window: its hours, the minutes of an hour that is
only partly in it, and the seconds of such a minute. Extremes of numbers, the first and last of
them, and the registers of distinct counts are those of the same buckets of each window.

P points in time, W windows, Q keys, N rows, K integers of a row; the others as in counter_rows.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from etl.array_types import Bools, Bytes, Float64, Int64
from features.counters.aggregations import NumberInput, NumericAggregation
from features.counters.distinct_counts import NUM_REGISTERS, estimate_distinct
from features.counters.numeric_columns import fixed_point_of, mean_of
from ranking.feature_store.counter_rows import (
    COUNTER_LEVELS,
    LOW_32_BITS,
    CounterLevel,
    RowLayout,
    child_record_key,
    decay_weights,
)
from ranking.feature_store.storage import Txn


def read_windows(layout: RowLayout, txn: Txn, record_keys: Sequence[bytes], as_of: int) -> Float64:
    """The counters (Q, columns) of keys, in the order of their columns; NaN for no such event.

    All pairs of a point (`as_of`, or the start of a window) and a key go down the levels together.
    A pair stays as long as its record has a row for the edge bucket, which contains its second; the
    next level splits it.
    """
    sums = WindowSums.zeros(layout, len(record_keys), as_of)
    point, key = (axis.ravel() for axis in np.indices(sums.totals.shape[:2]))
    records, record, key_of_record = list(record_keys), key, np.arange(len(record_keys))
    parent = None
    for level in COUNTER_LEVELS:
        rows = LevelRows.read(layout, level, txn.get_many(level.table, records))
        bucket = sums.points[point] // level.bucket_seconds
        before, has_edge = rows.totals_before(record, bucket)
        sums.totals[point, key] += before
        sums.add_rows(rows, key_of_record[rows.record], parent)
        point, key, bucket, parent = point[has_edge], key[has_edge], bucket[has_edge], level
        if not len(point):
            break
        distinct, record = np.unique((key << 32) + bucket, return_inverse=True)
        key_of_record = distinct >> 32
        records = [
            child_record_key(record_keys[packed >> 32], packed & LOW_32_BITS)
            for packed in distinct.tolist()
        ]
    return sums.columns()


@dataclass(frozen=True)
class LevelRows:
    """The concatenated rows (N) of several records of a level; `record` (N) is that of each row."""

    layout: RowLayout
    level: CounterLevel
    rows: np.ndarray
    record: Int64

    @classmethod
    def read(cls, layout: RowLayout, level: CounterLevel, records: Sequence[bytes]) -> "LevelRows":
        """Concatenate records, whose rows are sorted by bucket."""
        dtype = layout.dtype(level)
        sizes = np.array([len(record) // dtype.itemsize for record in records], np.int64)
        rows = np.frombuffer(b"".join(records), dtype)
        return cls(layout, level, rows, np.repeat(np.arange(len(records)), sizes))

    @property
    def bucket(self) -> Int64:
        """The number of each row's bucket since 1970 (N)."""
        return self.rows["bucket"].astype(np.int64)

    def totals_before(self, record: Int64, bucket: Int64) -> tuple[Int64, Bools]:
        """Integers (n, K) before a bucket of each of n records; whether it has that bucket (n)."""
        integers = np.concatenate(
            [self.rows[name] for name in ("counts", "number_counts", "number_sums")], axis=1
        )
        cumulative = np.zeros((len(self.rows) + 1, integers.shape[1]), np.int64)
        np.cumsum(integers.astype(np.int64), 0, out=cumulative[1:])
        position = (self.record << 32) + self.bucket
        target = (record << 32) + bucket
        first, stop = np.searchsorted(position, record << 32), np.searchsorted(position, target)
        has_bucket = np.append(position, -1)[stop] == target
        return cumulative[stop] - cumulative[first], has_bucket

    def last_seconds(self, as_of: int) -> Int64:
        """The second of the last event of each type in rows that end before `as_of` (N, S).

        0 without one.
        """
        if self.level.is_lowest:
            types = self.layout.counted_types
            index = [types.index(type_) for type_ in self.layout.aggregations.last_types]
            last = np.where(self.rows["counts"][:, index] > 0, self.bucket[:, None], 0)
        else:
            last = self.rows["last_event"].astype(np.int64)
        is_before = (self.bucket + 1) * self.level.bucket_seconds <= as_of
        return np.where(is_before[:, None], last, 0)

    def timed_numbers(self, field: str) -> np.ndarray:
        """The first or last numbers of rows (N, numbers of the field), as TIMED_NUMBER."""
        if not self.level.is_lowest:
            return self.rows[field]
        name = "smallest" if field == "first" else "largest"
        extremes, of_field = self.layout.fields[name], self.layout.fields[field]
        numbers = self.rows[name][:, [extremes.index(of) for of in of_field]]
        counts = self.rows["number_counts"][:, [self.layout.numbers.index(of) for of in of_field]]
        timed = self.layout.empty_rows(COUNTER_LEVELS[0], len(self.rows))[field]
        timed["number"] = numbers
        np.copyto(timed["second"], self.rows["bucket"][:, None], where=counts > 0)
        return timed

    def decayed(self, selected: Bools, as_of: int) -> Float64:
        """The decayed counts of selected rows (n) as of a second after them: (n, H, T)."""
        of, rows = self.layout.aggregations, self.rows[selected]
        last_second = (self.bucket[selected] + 1) * self.level.bucket_seconds - 1
        weights = decay_weights(as_of - last_second, of.half_lives)
        counts = rows["counts"][:, None, : len(of.count_types)]
        sums: Float64 = counts if self.level.is_lowest else rows["decayed"]
        return weights[:, :, None] * sums


@dataclass(frozen=True)
class WindowSums:
    """Sums and extremes over the rows of all levels.

    Attributes:
        points: The seconds (P) up to which integers are added: `as_of`, and the start of each
            window.
        totals: The integers before each point (P, Q, K).
        decayed: The decayed counts (Q, H, T).
        last_event: The second of the last event (Q, S); 0 without one.
        extremes: Of each field, its numbers in each window (W, Q, numbers of the field).
        registers: The registers of distinct counts in each window (W, Q, D, registers).
    """

    layout: RowLayout
    points: Int64
    totals: Int64
    decayed: Float64
    last_event: Int64
    extremes: Mapping[str, np.ndarray]
    registers: Bytes

    @classmethod
    def zeros(cls, layout: RowLayout, num_keys: int, as_of: int) -> "WindowSums":
        """The sums of no rows."""
        of = layout.aggregations
        points = np.maximum(as_of - np.array([0, *of.windows]), 0)
        num_integers = len(layout.counted_types) + 2 * len(layout.numbers)
        empty = layout.empty_rows(COUNTER_LEVELS[0], len(of.windows) * num_keys)
        shape = (len(of.windows), num_keys)
        return cls(
            layout,
            points,
            np.zeros((len(points), num_keys, num_integers), np.int64),
            np.zeros((num_keys, len(of.half_lives), len(of.count_types))),
            np.zeros((num_keys, len(of.last_types)), np.int64),
            {
                field: empty[field].reshape(*shape, len(numbers))
                for field, numbers in layout.fields.items()
            },
            empty["registers"].reshape(*shape, len(of.distinct), NUM_REGISTERS),
        )

    @property
    def as_of(self) -> int:
        """The second as of which counters are read."""
        return int(self.points[0])

    def add_rows(self, rows: LevelRows, key: Int64, parent: CounterLevel | None) -> None:
        """Add to all but the totals; `key` (N) is the key of each row."""
        of = self.layout.aggregations
        if self.last_event.size:
            _reduce_by_key(np.maximum, self.last_event, key, rows.last_seconds(self.as_of))
        if self.decayed.size:
            is_added = self._is_added(rows, of.longest_window, parent)
            decayed = rows.decayed(is_added, self.as_of)
            _reduce_by_key(np.add, self.decayed, key[is_added], decayed)
        has_extremes = self.layout.fields["smallest"] or self.layout.fields["largest"]
        for index, window in enumerate(of.windows if has_extremes else ()):
            self._add_extremes(rows, key, index, self._is_added(rows, window, parent))
        if of.distinct:
            self._add_registers(rows, key)

    def _add_extremes(self, rows: LevelRows, key: Int64, window: int, is_added: Bools) -> None:
        """Add selected rows to the extremes of a window, given by its index."""
        for field, extreme in (("smallest", np.minimum), ("largest", np.maximum)):
            numbers = self.extremes[field][window]
            _reduce_by_key(extreme, numbers, key[is_added], rows.rows[field][is_added])
        for field in ("first", "last"):
            timed = rows.timed_numbers(field)[is_added]
            for column in range(timed.shape[1]):
                of_keys = self.extremes[field][window][:, column]
                _keep_first_or_last(field, of_keys, key[is_added], timed[:, column])

    def _add_registers(self, rows: LevelRows, key: Int64) -> None:
        """Add rows to the registers of the shortest window that they lie within.

        `columns` merges those of shorter windows into longer ones, so that each row is read once.
        A row whose parent lies within a longer window may be added again, which changes no maximum.
        """
        second = rows.bucket * rows.level.bucket_seconds
        position = (key << 32) + second
        first_of_keys = np.arange(len(self.decayed)) << 32
        end = np.searchsorted(position, first_of_keys + self.as_of - rows.level.bucket_seconds + 1)
        for window in np.argsort(self.layout.aggregations.windows):
            start_second = self.points[1 + window]
            start = np.minimum(np.searchsorted(position, first_of_keys + start_second), end)
            for of_key in np.flatnonzero(start < end):
                registers = rows.rows["registers"][start[of_key] : end[of_key]].max(0)
                merged = self.registers[window, of_key]
                np.maximum(merged, registers, out=merged)
            end = start

    def _is_added(self, rows: LevelRows, window: int, parent: CounterLevel | None) -> Bools:
        """Whether the bucket of each row (N) lies within a window, and its parent does not."""
        start = rows.bucket * rows.level.bucket_seconds
        is_within = self._is_within(start, window, rows.level)
        return is_within & ~self._is_within(start, window, parent) if parent else is_within

    def _is_within(self, second: Int64, window: int, level: CounterLevel) -> Bools:
        """Whether the bucket of each second (N) in a level lies within a window."""
        start = second // level.bucket_seconds * level.bucket_seconds
        return (start >= self.as_of - window) & (start + level.bucket_seconds <= self.as_of)

    def columns(self) -> Float64:
        """The counters (Q, columns), in the order of their columns."""
        of, num_keys = self.layout.aggregations, len(self.decayed)
        in_windows = self.totals[0] - self.totals[1:]
        by_length = np.argsort(of.windows)
        registers = np.empty_like(self.registers)
        registers[by_length] = np.maximum.accumulate(self.registers[by_length])
        num_counts = len(self.layout.counted_types)
        numbers = [self._function(each, in_windows[..., num_counts:]) for each in of.numeric]
        age = np.where(self.last_event > 0, self.as_of - self.last_event, np.inf)
        parts = (
            in_windows[..., : len(of.count_types)].transpose(1, 0, 2),
            self.decayed,
            np.where(age <= of.longest_window, age, np.nan),
            np.array(numbers).reshape(len(numbers), len(of.windows), num_keys).transpose(2, 1, 0),
            estimate_distinct(registers).transpose(1, 0, 2),
        )
        shapes = [(num_keys, prod(part.shape[1:])) for part in parts]
        return np.concatenate([p.reshape(shape) for p, shape in zip(parts, shapes, strict=True)], 1)

    def _function(self, aggregation: NumericAggregation, sums: Int64) -> Float64:
        """A function of numbers (W, Q) in units of counters; `sums` (W, Q, 2 P) in windows.

        Without a number a sum is 0 and others are NaN.
        """
        function, of = aggregation.function, aggregation.input
        index = self.layout.numbers.index(of)
        count, total = sums[..., index], sums[..., len(self.layout.numbers) + index]
        match function:
            case "sum":
                values = total.astype(np.float64)
            case "mean":
                values = mean_of(total, count)
            case "min" | "max":
                values = self._extreme("smallest" if function == "min" else "largest", of)
            case "first" | "last":
                values = self._extreme(function, of)["number"]
        values = values / fixed_point_of(of.column).per_unit
        return values if function == "sum" else np.where(count > 0, values, np.nan)

    def _extreme(self, field: str, of: NumberInput) -> np.ndarray:
        """A number of a field of extremes, in each window (W, Q)."""
        return self.extremes[field][..., self.layout.fields[field].index(of)]


def _reduce_by_key(
    reduce: np.ufunc, totals: npt.NDArray[Any], key: Int64, values: npt.NDArray[Any]
) -> None:
    """Merge values (N, ...), whose keys (N) ascend, into the totals (Q, ...) of their keys."""
    starts = np.flatnonzero(np.diff(key, prepend=-1))
    if len(starts):
        of_key = key[starts]
        totals[of_key] = reduce(totals[of_key], reduce.reduceat(values, starts, axis=0))


def _keep_first_or_last(field: str, kept: np.ndarray, key: Int64, timed: np.ndarray) -> None:
    """Merge timed numbers (N), whose keys (N) ascend, into the first or last ones of keys (Q)."""
    if not len(key):
        return
    all_keys = np.concatenate((np.arange(len(kept)), key))
    candidates = np.concatenate((kept, timed))
    order = np.lexsort((candidates["number"], candidates["second"], all_keys))
    last_of_key = np.append(np.flatnonzero(np.diff(all_keys[order])), len(order) - 1)
    of_key = last_of_key if field == "last" else np.append(0, last_of_key[:-1] + 1)
    kept[:] = candidates[order[of_key]]
