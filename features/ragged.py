"""Ragged arrays and sorted runs, without Python loops over rows."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Int64 = npt.NDArray[np.int64]


def concat_ranges(starts: Int64, stops: Int64) -> Int64:
    """The ranges [starts[i], stops[i]) one after the other, as one array."""
    lengths = stops - starts
    ends = np.cumsum(lengths)
    total = ends[-1] if len(ends) else 0
    positions: Int64 = np.arange(total) + np.repeat(starts - (ends - lengths), lengths)
    return positions


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
