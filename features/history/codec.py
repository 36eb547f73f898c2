"""The storage format of `history` rows: delta-encoded events, stored as byte planes.

A row holds the events of one user over one day, or one chunk of a compacted history. Each event is
the gap in seconds to the event before it, the lag of its own time behind its visibility, an item
index, and one byte each for surface, event type, dwell time, and the attributes that the spec
declares.

A list of numbers is stored as byte planes, one binary column per byte of the number: bytes of the
same significance are stored together and most high bytes are zero, so a general compressor works
well and decoding is one copy per plane. A plane that is all zero in a row stores no bytes.

N numbers in R rows, delimited by `offsets` (R+1). NumPy and Arrow only: Spark writes with this
module and the training reader reads with it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from etl.array_types import Bytes, Float64, Int32, Int64

Int8 = npt.NDArray[np.int8]
Integers = npt.NDArray[Any]  # int32, or int8 of one byte

DWELL_STEPS_PER_LOG_MS = 7.8  # per unit of ln(1 + ms): a step is 14 %, 127 is three hours
BYTE_WIDTHS = {"gaps": 4, "lags": 4, "items": 4, "surfaces": 1, "types": 1, "dwells": 1}
ATTRIBUTE_PREFIX = "attr_"  # of lists with one byte besides these
NUMBER_STEPS_PER_LOG = 6.1  # per unit of ln(1 + |x|): a step is 18 %, 127 is 1e9
ZERO_CODE = 128


@dataclass(frozen=True)
class UserEvents:
    """Events (N) of users (U), one user after another, delimited by `offsets` (U+1).

    `visibility_lags` are None if the reader did not read them. `attributes` are codes by column:
    embedding rows of categories, or those of `quantize_number`; 0 is missing.
    """

    offsets: Int64
    visible_ts: Int64
    visibility_lags: Int32 | None
    item_indexes: Int32
    surfaces: Int8
    types: Int8
    dwells: Int8
    attributes: Mapping[str, Bytes] = field(default_factory=dict)

    @property
    def event_ts(self) -> Int64:
        """When the events occurred, in seconds."""
        assert self.visibility_lags is not None, "the lags were not read"
        return self.visible_ts - self.visibility_lags


def quantize_dwell(dwell_ms: Float64) -> Int8:
    """Dwell times in milliseconds as logarithmic steps 1 to 127; 0 for a missing one (NaN)."""
    steps = np.rint(np.log1p(np.nan_to_num(dwell_ms, nan=0.0)) * DWELL_STEPS_PER_LOG_MS)
    return np.where(np.isnan(dwell_ms), 0, np.clip(steps, 1, 127)).astype(np.int8)


def dequantize_dwell(quantized: Int8) -> Float64:
    """The middle of each step of `quantize_dwell`, in milliseconds; NaN for a missing one."""
    dwell_ms = np.expm1(quantized.astype(np.float64) / DWELL_STEPS_PER_LOG_MS)
    return np.where(quantized == 0, np.nan, dwell_ms)


def quantize_number(values: Float64) -> Bytes:
    """Numbers as logarithmic steps from 1 to 255, where 128 is zero; 0 for a missing one (NaN)."""
    known = np.nan_to_num(values, nan=0.0)
    steps = np.copysign(np.log1p(np.abs(known)), known) * NUMBER_STEPS_PER_LOG
    codes = ZERO_CODE + np.clip(np.rint(steps), -127, 127)
    return np.where(np.isnan(values), 0, codes).astype(np.uint8)


def attribute_columns(columns: Iterable[str]) -> list[str]:
    """Those of some columns that have attributes of events."""
    return [name for name in columns if name.startswith(ATTRIBUTE_PREFIX)]


def delta_encode(visible_ts: Int64, starts: Int64) -> Int32:
    """Seconds from each event to the event before it; 0 at the `starts` of rows."""
    gaps = np.diff(visible_ts, prepend=visible_ts[:1])
    gaps[starts] = 0
    return gaps.astype(np.int32)


def delta_decode(first_ts: Int64, deltas: Int32, offsets: Int64) -> Int64:
    """The inverse of `delta_encode`, for rows that start at `first_ts` (R)."""
    total = np.cumsum(deltas, dtype=np.int64)
    total_before_row = np.concatenate(([0], total))[offsets[:-1]]
    return total + np.repeat(first_ts - total_before_row, np.diff(offsets))


def _byte_width(name: str) -> int:
    return BYTE_WIDTHS.get(name, 1)


def plane_columns(name: str) -> list[str]:
    """The columns that hold a list's byte planes, least significant byte first."""
    width = _byte_width(name)
    return [name] if width == 1 else [f"{name}_{byte}" for byte in range(width)]


PLANE_COLUMNS = tuple(column for name in BYTE_WIDTHS for column in plane_columns(name))


def split_byte_planes(name: str, values: Integers, offsets: Int64) -> dict[str, pa.Array]:
    """The byte planes (R) of a list's values (N), by column; each row holds at least one value."""
    width = _byte_width(name)
    bytes_of_values = values.astype(_dtype(width)).view(np.uint8).reshape(-1, width)
    return {
        column: _binary_column(bytes_of_values[:, byte], offsets)
        for byte, column in enumerate(plane_columns(name))
    }


def _dtype(width: int) -> str:
    return "<i4" if width > 1 else "i1"


def _binary_column(plane: Bytes, offsets: Int64) -> pa.Array:
    """One binary value per row, empty where all of its bytes are zero."""
    lengths = np.diff(offsets)
    all_zero = np.maximum.reduceat(plane, offsets[:-1]) == 0 if len(lengths) else lengths > 0
    if all_zero.any():
        plane = plane[np.repeat(~all_zero, lengths)]
        lengths = np.where(all_zero, 0, lengths)
    stored_offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    buffers = [None, pa.py_buffer(stored_offsets), pa.py_buffer(np.ascontiguousarray(plane))]
    return pa.Array.from_buffers(pa.binary(), len(lengths), buffers)


def join_byte_planes(name: str, columns: Mapping[str, pa.Array], lengths: Int64) -> Integers:
    """The values (N) of rows of `lengths` (R): the inverse of `split_byte_planes`."""
    width = _byte_width(name)
    bytes_of_values = np.zeros((int(lengths.sum()), width), np.uint8)
    for byte, column in enumerate(plane_columns(name)):
        _fill_plane(bytes_of_values[:, byte], columns[column], lengths)
    return bytes_of_values.reshape(-1).view(_dtype(width))


def _fill_plane(plane: Bytes, rows: pa.Array, lengths: Int64) -> None:
    _, offsets, data = rows.buffers()
    if data is None or not len(rows):
        return
    cuts = np.frombuffer(offsets, np.int32)[rows.offset : rows.offset + len(rows) + 1]
    stored = np.frombuffer(data, np.uint8)[cuts[0] : cuts[-1]]
    is_stored = np.diff(cuts) > 0
    if is_stored.all():
        plane[:] = stored
    elif is_stored.any():
        plane[np.repeat(is_stored, lengths)] = stored


def decode_rows(rows: pa.Table, lengths: Int64) -> dict[str, Integers]:
    """The lists of `history` rows of `lengths` (R) events, each flat (N).

    Lists whose columns were not read are absent.
    """
    lists: dict[str, Integers] = {}
    for name in (*BYTE_WIDTHS, *attribute_columns(rows.column_names)):
        names = plane_columns(name)
        if names[0] in rows.column_names:
            planes = {column: rows[column].combine_chunks() for column in names}
            lists[name] = join_byte_planes(name, planes, lengths)
    return lists
