"""Point-in-time aggregations of events by key, in NumPy on one sorted axis of (key, second).

Counts and the last event of a window are differences of positions and of sums of integers on this
axis. Decayed counts are added up in a tree over time, which neither subtracts nor overflows: see
`_decayed_sums`. Functions of numbers of events are in features/counters/numeric_columns.py, and
distinct counts in features/counters/distinct_counts.py. All results depend only on the events in
the window of a query, to the last bit, and not on which other events are at hand.

N events, Q queries, W windows, H half-lives, T event types, A functions of numbers, D distinct
counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from etl.array_types import Bools, Float64, Int32, Int64
from etl.spec.counters import Function
from etl.spec.model import DataSpec
from features.counters.distinct_counts import MISSING_ENTRY, SortedEntries
from features.counters.numeric_columns import Numbers, SortedNumbers, fixed_point_of
from features.ragged import count_visible

Number = TypeVar("Number", bound=np.generic)


class NumberInput(NamedTuple):
    """A column of the events of a type, given by its code, of which functions are computed."""

    column: str
    event_type: int


class NumericAggregation(NamedTuple):
    """A function of a column of the events of a type, given by its code."""

    function: Function
    column: str
    event_type: int

    @property
    def input(self) -> NumberInput:
        """What the function is computed of."""
        return NumberInput(self.column, self.event_type)


class DistinctCount(NamedTuple):
    """The distinct values of a part of keys that events of a type, given by its code, have."""

    column: str
    event_type: int


@dataclass(frozen=True)
class Aggregations:
    """What is computed for each key: windows and half-lives in seconds, event types as codes."""

    windows: tuple[int, ...]
    count_types: tuple[int, ...]
    half_lives: tuple[int, ...] = ()
    last_types: tuple[int, ...] = ()
    numeric: tuple[NumericAggregation, ...] = ()
    distinct: tuple[DistinctCount, ...] = ()

    @classmethod
    def from_spec(cls, spec: DataSpec) -> "Aggregations":
        """The aggregations that a spec declares."""
        declared, codes = spec.counters, spec.event_codes
        return cls(
            windows=declared.windows,
            count_types=tuple(codes[event] for event in declared.events),
            half_lives=declared.half_lives,
            last_types=tuple(codes[event] for event in declared.time_since_last),
            numeric=tuple(
                NumericAggregation(each.function, each.column, codes[each.event])
                for each in declared.numeric_aggregations
            ),
            distinct=tuple(
                DistinctCount(each.column, codes[each.event]) for each in declared.distinct_counts
            ),
        )

    @property
    def longest_window(self) -> int:
        """Seconds of the longest window."""
        return max(self.windows)

    @property
    def missing(self) -> Float64:
        """The values of a key without events (columns): counts and sums 0, others NaN."""
        num_counts = (len(self.windows) + len(self.half_lives)) * len(self.count_types)
        of_window = [0.0 if each.function == "sum" else np.nan for each in self.numeric]
        others = [np.nan] * len(self.last_types) + of_window * len(self.windows)
        num_distinct = len(self.windows) * len(self.distinct)
        return np.concatenate((np.zeros(num_counts), others, np.zeros(num_distinct)))

    @property
    def all_types(self) -> frozenset[int]:
        """The codes of all event types that are aggregated."""
        of_numbers = (each.event_type for each in self.numeric)
        of_distinct = (each.event_type for each in self.distinct)
        return frozenset((*self.count_types, *self.last_types, *of_numbers, *of_distinct))

    @property
    def input_columns(self) -> tuple[str, ...]:
        """The columns of which functions are computed."""
        return tuple(dict.fromkeys(each.column for each in self.numeric))

    @property
    def distinct_columns(self) -> tuple[str, ...]:
        """The parts of keys of which distinct values are counted."""
        return tuple(dict.fromkeys(each.column for each in self.distinct))

    def values(self, events: "EventRows", query_key: Int64, query_ts: Int64) -> Float64:
        """All aggregations of each query (Q, columns), in the order of columns; NaN is null."""
        longest = self.longest_window
        aligned = KeyedEvents.align(events, query_key, query_ts, longest)
        parts = (
            aligned.counts(self.windows, self.count_types),
            aligned.decayed_counts(self.half_lives, self.count_types, longest),
            aligned.seconds_since_last(self.last_types, longest),
            aligned.functions_of_numbers(self.windows, self.numeric),
            aligned.distinct_counts(self.windows, self.distinct),
        )
        return np.concatenate(parts, axis=1, dtype=np.float64)


@dataclass(frozen=True)
class EventRows:
    """Rows (N) of events that have a key, a second and a type in common.

    Attributes:
        key: Any integers.
        ts: Seconds.
        type: Codes of event types.
        count: The number of events.
        numbers: The numbers that they have, by column.
        entries: The entries of values that are counted distinctly, by the part of keys.
    """

    key: Int64
    ts: Int64
    type: Int64
    count: Int64
    numbers: Mapping[str, Numbers] = field(default_factory=dict)
    entries: Mapping[str, Int64] = field(default_factory=dict)

    @classmethod
    def of_events(
        cls,
        key: Int64,
        ts: Int64,
        type_: Int64,
        numbers: Mapping[str, Int64] | None = None,
        entries: Mapping[str, Int64] | None = None,
    ) -> "EventRows":
        """One row per event; numbers (N) are in fixed point, and like entries may be MISSING."""
        of_columns = {name: Numbers.of_events(of) for name, of in (numbers or {}).items()}
        return cls(key, ts, type_, np.ones(len(key), np.int64), of_columns, entries or {})

    def take(self, rows: Int64 | Bools) -> "EventRows":
        """Some of the rows."""
        numbers = {name: of_column.take(rows) for name, of_column in self.numbers.items()}
        entries = {name: of_column[rows] for name, of_column in self.entries.items()}
        return EventRows(
            self.key[rows], self.ts[rows], self.type[rows], self.count[rows], numbers, entries
        )


@dataclass(frozen=True)
class KeyedEvents:
    """Events (N) and queries (Q) of several keys on one axis; the window of a query is a range.

    A position is the number of a key times the length of its part of the axis, plus the second.
    Events are sorted by `position`; queries by `query_position`, and `query_order` restores theirs.
    """

    position: Int64
    events: EventRows
    query_position: Int64
    query_order: Int64

    @classmethod
    def align(
        cls, events: EventRows, query_key: Int64, query_ts: Int64, longest_window: int
    ) -> "KeyedEvents":
        """Place events and queries, whose keys are any integers and times seconds, on an axis."""
        event_ts = events.ts
        keys, group = np.unique(np.concatenate((events.key, query_key)), return_inverse=True)
        event_group, query_group = group[: len(events.key)], group[len(events.key) :]
        # Each key begins at a multiple of a power of two, which aligns the tree with the clock.
        bits = int(longest_window).bit_length()
        first = min(event_ts.min(initial=0), query_ts.min(initial=0) - longest_window)
        origin = first >> bits << bits
        last = max(event_ts.max(initial=origin), query_ts.max(initial=origin))
        span = ((last - origin >> bits) + 1) << bits
        assert len(keys) * span < 2**62, "times and keys do not fit one integer"
        position = event_group * span + (event_ts - origin)
        query_position = query_group * span + (query_ts - origin)
        order = np.argsort(position, kind="stable")
        query_order = np.argsort(query_position, kind="stable")
        return cls(position[order], events.take(order), query_position[query_order], query_order)

    def counts(self, windows: Sequence[int], types: Sequence[int]) -> Int32:
        """Events in [query - window, query), at most 2^31 - 1, by window and type (Q, W * T)."""
        total = np.zeros((len(self.position) + 1, len(types)), np.int64)
        is_type = self.events.type[:, None] == np.array(types)
        np.cumsum(is_type * self.events.count[:, None], axis=0, out=total[1:])
        total_at_end = total[count_visible(self.position, self.query_position)]
        counts = [
            total_at_end - total[count_visible(self.position, self.query_position - window)]
            for window in windows
        ]
        clipped = np.concatenate(counts, axis=1).clip(max=np.iinfo(np.int32).max)
        return self._in_query_order(clipped.astype(np.int32))

    def decayed_counts(
        self, half_lives: Sequence[int], types: Sequence[int], window: int
    ) -> Float64:
        """Sums of 2^(-age / half-life) over [query - window, query): (Q, H * T)."""
        sums = np.zeros((len(self.query_position), len(half_lives), len(types)))
        if not half_lives:
            return sums.reshape(len(sums), 0)
        start = self.query_position - window
        for column, type_ in enumerate(types):
            of_type = self.events.type == type_
            seconds, row = np.unique(self.position[of_type], return_inverse=True)
            num_events = np.bincount(row, self.events.count[of_type], len(seconds)).astype(float)
            sums[:, :, column] = _decayed_sums(
                seconds, num_events, start, self.query_position, np.array(half_lives)
            )
        return self._in_query_order(sums.reshape(len(sums), len(half_lives) * len(types)))

    def seconds_since_last(self, types: Sequence[int], window: int) -> Float64:
        """Age of the last event in [query - window, query), by type (Q, T); NaN without one."""
        ages = np.full((len(self.query_position), len(types)), np.nan)
        for column, type_ in enumerate(types):
            position = self.position[self.events.type == type_]
            stop = count_visible(position, self.query_position)
            seen = np.flatnonzero(stop)
            age = self.query_position[seen] - position[stop[seen] - 1]
            ages[seen, column] = np.where(age <= window, age, np.nan)
        return self._in_query_order(ages)

    def functions_of_numbers(
        self, windows: Sequence[int], aggregations: Sequence[NumericAggregation]
    ) -> Float64:
        """Functions of the numbers in [query - window, query): (Q, W * A), in units of counters.

        Without a number a sum is 0 and others are NaN.
        """
        values = np.zeros((len(self.query_position), len(windows), len(aggregations)))
        for number in dict.fromkeys(each.input for each in aggregations):
            stored = self._sorted_numbers(number)
            stop = count_visible(stored.position, self.query_position)
            for row, window in enumerate(windows):
                start = count_visible(stored.position, self.query_position - window)
                for column, each in enumerate(aggregations):
                    if each.input == number:
                        of_window = stored.aggregate(each.function, start, stop)
                        values[:, row, column] = of_window / fixed_point_of(number.column).per_unit
        return self._in_query_order(values.reshape(len(values), len(windows) * len(aggregations)))

    def distinct_counts(
        self, windows: Sequence[int], aggregations: Sequence[DistinctCount]
    ) -> Float64:
        """Estimated numbers of distinct values in [query - window, query): (Q, W * D)."""
        counts = np.zeros((len(self.query_position), len(windows), len(aggregations)))
        starts = self.query_position[None] - np.array(windows)[:, None]
        for column, each in enumerate(aggregations):
            entries = self.events.entries[each.column]
            has_value = (self.events.type == each.event_type) & (entries != MISSING_ENTRY)
            stored = SortedEntries(self.position[has_value], entries[has_value])
            first = count_visible(stored.position, starts)
            end = np.broadcast_to(count_visible(stored.position, self.query_position), first.shape)
            of_windows = stored.estimate_distinct(first.ravel(), end.ravel())
            counts[:, :, column] = of_windows.reshape(first.shape).T
        return self._in_query_order(counts.reshape(len(counts), len(windows) * len(aggregations)))

    def _sorted_numbers(self, number: NumberInput) -> SortedNumbers:
        numbers = self.events.numbers[number.column]
        has_number = (self.events.type == number.event_type) & (numbers.count > 0)
        return SortedNumbers(self.position[has_number], numbers.take(has_number))

    def _in_query_order(self, rows: npt.NDArray[Number]) -> npt.NDArray[Number]:
        restored = np.empty_like(rows)
        restored[self.query_order] = rows
        return restored


def count_all_before(key: Int64, ts: Int64, query_key: Int64, query_ts: Int64) -> Int32:
    """The number of events with each query's key before its time (Q)."""
    events = EventRows.of_events(key, ts, np.zeros(len(key), np.int64))
    all_time = max(1, int(query_ts.max(initial=0) - ts.min(initial=0)))
    return KeyedEvents.align(events, query_key, query_ts, all_time).counts((all_time,), (0,))[:, 0]


def _decayed_sums(
    seconds: Int64, num_events: Float64, start: Int64, stop: Int64, half_lives: Int64
) -> Float64:
    """Sums of num_events * 2^(-(stop - second) / half-life) over seconds in [start, stop): (Q, H).

    `seconds` are positions in ascending order. A node of a level of the tree covers 2^level seconds
    from a multiple of that number, and holds the sum of its events as of its last second. From
    level to level, a range of nodes loses the first and the last one if the range does not contain
    the other child of their parent: these are added to the sum of the query. So a query adds at
    most two nodes of each level, all weights are at most 1, and nothing is subtracted.
    """
    totals = np.zeros((len(stop), len(half_lives)))
    node, sums = seconds, np.repeat(num_events[:, None], len(half_lives), axis=1)
    first, last = count_visible(node, start), count_visible(node, stop) - 1
    query = np.flatnonzero(first <= last)
    first, last, low, high = first[query], last[query], start[query], stop[query] - 1
    for level in count():
        if not len(query):
            break
        is_done = last - first < 2
        adds_first = is_done | (node[first] == low) & (low % 2 == 1)
        adds_last = np.where(is_done, first < last, (node[last] == high) & (high % 2 == 0))
        for is_added, index in ((adds_first, first), (adds_last, last)):
            row, added = query[is_added], index[is_added]
            age = stop[row] - ((node[added] + 1 << level) - 1)
            totals[row] += sums[added] * np.exp2(-age[:, None] / half_lives)
        query, low, high = query[~is_done], low[~is_done] + 1 >> 1, high[~is_done] - 1 >> 1
        first, last = (first + adds_first)[~is_done], (last - adds_last)[~is_done]
        node, sums, parent = _merge_siblings(node, sums, np.exp2(-(2.0**level) / half_lives))
        first, last = parent[first], parent[last]
    return totals


def _merge_siblings(node: Int64, sums: Float64, decay: Float64) -> tuple[Int64, Float64, Int64]:
    """The next level of the tree: its nodes and sums, and the index of each node's parent.

    `decay` (H) is the weight of a left child as of the last second of its parent.
    """
    is_new = np.diff(node >> 1, prepend=-1) != 0
    parent = np.cumsum(is_new) - 1
    weighted = np.where((node & 1 == 0)[:, None], sums * decay, sums)
    merged = weighted[is_new]
    merged[parent[~is_new]] += weighted[~is_new]
    return node[is_new] >> 1, merged, parent
