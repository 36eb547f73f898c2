"""Sorted Arrow batches of a Spark partition, re-cut so that no group is split."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc


def whole_groups(batches: Iterator[pa.RecordBatch], key: str) -> Iterator[pa.Table]:
    """Tables that hold all rows of each value of `key`; the batches are sorted by it."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        if not batch.num_rows:
            continue
        values = batch[key]
        starts = run_starts(values)
        first, last = int(starts[1]) if len(starts) > 1 else batch.num_rows, int(starts[-1])
        continues = bool(held) and held[-1][key][-1].equals(values[0])
        head = first if continues else 0
        if last == 0 and (continues or not held):
            held.append(batch)
            continue
        done = [*held, batch.slice(0, max(head, last))]
        yield pa.Table.from_batches(done)
        held = [batch.slice(max(head, last))] if max(head, last) < batch.num_rows else []
    if held:
        yield pa.Table.from_batches(held)


def run_starts(values: pa.Array) -> npt.NDArray[np.int64]:
    """Positions at which a value differs from the one before it; the first is 0."""
    if not len(values):
        return np.zeros(0, np.int64)
    changed = pc.not_equal(values[1:], values[:-1]).to_numpy(zero_copy_only=False)
    return np.flatnonzero(np.concatenate(([True], changed)))
