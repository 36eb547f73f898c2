"""Runs of small integers as byte planes: one column of bytes for each byte of a number.

Bytes of one kind lie together and most high ones are zero, so that a general compressor comes
near what is possible, and decoding is one copy a plane. A run whose plane is all zero has no
bytes there. N numbers in R runs, cut by `offsets` (R+1).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Int64 = npt.NDArray[np.int64]
Numbers = npt.NDArray[Any]  # int32, or int8 of one byte
Bytes = npt.NDArray[np.uint8]

WIDTHS = {"gaps": 4, "lags": 4, "items": 4, "surfaces": 1, "types": 1, "dwells": 1}  # bytes


def planes(name: str) -> list[str]:
    """The columns of a list of numbers, lowest byte first."""
    return [f"{name}_{k}" for k in range(WIDTHS[name])] if WIDTHS[name] > 1 else [name]


COLUMNS = tuple(column for name in WIDTHS for column in planes(name))


def split(name: str, values: Numbers, offsets: Int64) -> dict[str, pa.Array]:
    """The planes of runs of numbers; each run holds at least one."""
    width = WIDTHS[name]
    every = values.astype("<i4" if width > 1 else "i1").view(np.uint8).reshape(-1, width)
    return {c: _runs(every[:, k], offsets) for k, c in enumerate(planes(name))}


def _runs(plane: Bytes, offsets: Int64) -> pa.Array:
    lengths = np.diff(offsets)
    empty = np.maximum.reduceat(plane, offsets[:-1]) == 0 if len(lengths) else lengths > 0
    if empty.any():
        plane = plane[np.repeat(~empty, lengths)]
        lengths = np.where(empty, 0, lengths)
    cuts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    data = pa.py_buffer(np.ascontiguousarray(plane))
    return pa.Array.from_buffers(pa.binary(), len(lengths), [None, pa.py_buffer(cuts), data])


def join(name: str, columns: Mapping[str, pa.Array], lengths: Int64) -> Numbers:
    """The numbers (N) of runs of `lengths` (R): the inverse of `split`."""
    width = WIDTHS[name]
    every = np.zeros((int(lengths.sum()), width), np.uint8)
    for k, column in enumerate(planes(name)):
        _fill(every[:, k], columns[column], lengths)
    return every.reshape(-1).view("<i4" if width > 1 else "i1")


def _fill(into: Bytes, runs: pa.Array, lengths: Int64) -> None:
    _, cuts, data = runs.buffers()
    if data is None or not len(runs):
        return
    at = np.frombuffer(cuts, np.int32)[runs.offset : runs.offset + len(runs) + 1]
    stored = np.frombuffer(data, np.uint8)[at[0] : at[-1]]
    there = np.diff(at) > 0
    if there.all():
        into[:] = stored
    elif there.any():
        into[np.repeat(there, lengths)] = stored


def unpack(rows: pa.Table, lengths: Int64) -> dict[str, Numbers]:
    """The lists that packed rows of `lengths` (R) events hold, each flat (N)."""
    there = [name for name in WIDTHS if planes(name)[0] in rows.column_names]
    columns = {c: rows[c].combine_chunks() for name in there for c in planes(name)}
    return {name: join(name, columns, lengths) for name in there}
