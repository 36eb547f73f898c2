"""Ragged arrays and sorted runs, without Python loops over rows.

The as-of rule: an event is visible to an example if and only if visible_ts < as_of_ts.

Both are in whole seconds, and the comparison is strict: events of the same second are not visible.
Spark expressions state the rule as `as_of_expression` and as `asof_join` (features/examples.py) do;
NumPy code counts and finds visible rows with the functions here.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from etl.array_types import Bools, Int64
from etl.event_time import day_end_sql
from etl.spec.model import DataSpec
from etl.spec.units import MICROS


def concat_ranges(starts: Int64, stops: Int64) -> Int64:
    """The ranges [starts[i], stops[i]) one after the other, as one array."""
    lengths = stops - starts
    ends = np.cumsum(lengths)
    total = ends[-1] if len(ends) else 0
    positions: Int64 = np.arange(total) + np.repeat(starts - (ends - lengths), lengths)
    return positions


def reduce_ranges(
    reduce: np.ufunc, values: npt.NDArray[Any], start: Int64, stop: Int64, empty: float | np.generic
) -> npt.NDArray[Any]:
    """A minimum, maximum or union of values[start:stop] of each range: (R, ...) of values (N, ...).

    `empty` is the result of an empty range, and has the type of the results. Level n has the
    results of 2^n values from each value on; two of them, which may overlap, cover a range.
    """
    reduced = np.full((len(start), *values.shape[1:]), empty)
    length = stop - start
    level_of = np.frexp(length)[1] - 1  # floor(log2(length)); -1 of empty ranges
    of_level = values
    for level in range(int(level_of.max(initial=-1)) + 1):
        if level:
            half = 1 << (level - 1)
            of_level = reduce(of_level[:-half], of_level[half:])
        ranges = np.flatnonzero(level_of == level)
        last = stop[ranges] - (1 << level)
        reduced[ranges] = reduce(of_level[start[ranges]], of_level[last])
    return reduced


def run_starts(values: pa.Array) -> Int64:
    """Positions at which a value differs from the one before it; the first is 0."""
    if not len(values):
        return np.zeros(0, np.int64)
    changed = pc.not_equal(values[1:], values[:-1]).to_numpy(zero_copy_only=False)
    return np.flatnonzero(np.concatenate(([True], changed)))


def regroup_batches(batches: Iterator[pa.RecordBatch], key_column: str) -> Iterator[pa.Table]:
    """Tables that hold all rows of each of their keys, from batches sorted by `key_column`.

    Spark cuts a partition into Arrow batches anywhere; here no key is split between two tables.
    """
    pending: list[pa.RecordBatch] = []  # rows of the last key, which the next batch may continue
    for batch in batches:
        if not batch.num_rows:
            continue
        keys = batch[key_column]
        last_start = int(run_starts(keys)[-1])
        continues = bool(pending) and pending[-1][key_column][-1].equals(keys[0])
        if last_start == 0 and (continues or not pending):
            pending.append(batch)
            continue
        yield pa.Table.from_batches([*pending, batch.slice(0, last_start)])
        pending = [batch.slice(last_start)]
    if pending:
        yield pa.Table.from_batches(pending)


def as_of_expression(spec: DataSpec) -> str:
    """Spark SQL for the second as of which an impression's features are computed.

    It is the impression's `event_ts`, but never later than its ingest time or the end of its
    landing day: a device clock that runs ahead must not reveal later events.
    """
    trusted_second = f"floor(least(event_ts, ingest_ts) / {MICROS['s']})"
    return f"CAST(least({trusted_second}, {day_end_sql(spec)}) AS BIGINT)"


def count_visible(visible_ts: Int64, as_of: Int64) -> Int64:
    """The number of `visible_ts` (ascending) that are visible as of each of `as_of`."""
    return np.searchsorted(visible_ts, as_of, side="left")


def latest_before(owners: Int64, times: Int64, query_owners: Int64, query_times: Int64) -> Int64:
    """For each query (Q) the position of its owner's latest row (N) before its time; -1 for none.

    Of an owner's rows of one time, the last.
    """
    distinct = np.unique(times)
    keys_per_owner = len(distinct) + 1
    row_keys = owners * keys_per_owner + np.searchsorted(distinct, times) + 1
    order = np.argsort(row_keys, kind="stable")
    query_keys = query_owners * keys_per_owner + np.searchsorted(distinct, query_times)
    rank = np.searchsorted(row_keys[order], query_keys, side="right") - 1
    row = np.concatenate((order, [-1]))[rank]
    is_own = (row >= 0) & (np.append(owners, -1)[row] == query_owners)
    return np.where(is_own, row, -1)


def is_pointer_valid(last_visible_ts: Int64, first_hidden_ts: Int64, as_of: Int64) -> Bools:
    """Whether a pointer into a history still separates visible events from later ones.

    `last_visible_ts` and `first_hidden_ts` are the `visible_ts` before and after the cut.
    """
    return (last_visible_ts < as_of) & (as_of <= first_hidden_ts)
