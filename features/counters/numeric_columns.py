"""Numbers of events in fixed point, and functions of them over ranges of sorted events.

Sums of integers are the same in any order and in any split of the events, which those of
floating-point numbers are not. Sums wrap at 64 bits: differences of prefix sums are right as long
as the sum of a window fits, which is up to 9e14 of values.

N rows of events, R ranges.
"""

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from etl.array_types import Bools, Float64, Int64
from etl.spec.counters import Function
from etl.spec.units import DAY
from features.ragged import reduce_ranges

MISSING = int(np.iinfo(np.int64).min)  # a number that an event does not have


@dataclass(frozen=True)
class FixedPoint:
    """How a numeric column of events is held as integers.

    A limit keeps one event, such as a view that was never closed, from outweighing all others, and
    900,000 events of the largest value within 64 bits.

    Attributes:
        limit: The largest magnitude, in the unit of `events`; larger numbers become it.
        scale: Integers per unit of `events`.
        per_unit: Integers per unit of the counters.
    """

    limit: float
    scale: int
    per_unit: int

    def round(self, values: Float64) -> Int64:
        """Values (N) of `events` as integers; MISSING where they are not finite."""
        is_missing = ~np.isfinite(values)
        limited = np.clip(np.where(is_missing, 0, values), -self.limit, self.limit)
        return np.where(is_missing, MISSING, np.rint(limited * self.scale).astype(np.int64))


_DWELL = FixedPoint(limit=float(DAY * 1000), scale=1, per_unit=1000)
_OTHER = FixedPoint(limit=1e9, scale=10**4, per_unit=10**4)


def fixed_point_of(column: str) -> FixedPoint:
    """How the numbers of a column are held."""
    return _DWELL if column == "dwell" else _OTHER


@dataclass(frozen=True)
class Numbers:
    """The numbers of one column in rows of events (N), in fixed point.

    Attributes:
        count: How many events of a row have the number.
        total: Their sum.
        smallest: The smallest of them; any integer where there is none.
        largest: The largest of them; any integer where there is none.
    """

    count: Int64
    total: Int64
    smallest: Int64
    largest: Int64

    @classmethod
    def of_events(cls, numbers: Int64) -> "Numbers":
        """One row per event; numbers may be MISSING."""
        has_number = numbers != MISSING
        known = np.where(has_number, numbers, 0)
        return cls(has_number.astype(np.int64), known, known, known)

    def take(self, rows: Int64 | Bools) -> "Numbers":
        """Some of the rows."""
        return Numbers(*(getattr(self, field.name)[rows] for field in fields(self)))


@dataclass(frozen=True)
class SortedNumbers:
    """Rows (N), each with one number or more, sorted by their position on an axis of time."""

    position: Int64
    numbers: Numbers

    def aggregate(self, function: Function, first: Int64, end: Int64) -> Float64:
        """A function of the rows first:end of each range (R), in fixed point.

        Without rows a sum is 0 and others are NaN.
        """
        match function:
            case "sum":
                return (self._totals[end] - self._totals[first]).astype(np.float64)
            case "mean":
                total = self._totals[end] - self._totals[first]
                return mean_of(total, self._counts[end] - self._counts[first])
            case "min":
                return reduce_ranges(np.minimum, self.numbers.smallest, first, end, empty=np.nan)
            case "max":
                return reduce_ranges(np.maximum, self.numbers.largest, first, end, empty=np.nan)
            case "first":
                end = np.where(first < end, self._end_of_second(first), first)
                return reduce_ranges(np.minimum, self.numbers.smallest, first, end, empty=np.nan)
            case "last":
                first = np.where(first < end, self._start_of_second(end - 1), end)
                return reduce_ranges(np.maximum, self.numbers.largest, first, end, empty=np.nan)

    def _start_of_second(self, row: Int64) -> Int64:
        """The first row with the position of each of some rows (R); rows may be out of bounds."""
        return np.searchsorted(self.position, self._positions(row), "left")

    def _end_of_second(self, row: Int64) -> Int64:
        """One after the last row with the position of each of some rows (R)."""
        return np.searchsorted(self.position, self._positions(row), "right")

    def _positions(self, row: Int64) -> Int64:
        return np.append(self.position, 0)[np.clip(row, 0, len(self.position))]

    @cached_property
    def _totals(self) -> Int64:
        """The sum of the numbers before each row, and of all (N + 1)."""
        return np.concatenate(([0], np.cumsum(self.numbers.total)))

    @cached_property
    def _counts(self) -> Int64:
        """How many numbers are before each row, and in all (N + 1)."""
        return np.concatenate(([0], np.cumsum(self.numbers.count)))


def mean_of(total: Int64, count: Int64) -> Float64:
    """Means of sums of integers; NaN where the count is 0."""
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
