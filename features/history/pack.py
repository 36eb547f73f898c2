"""The codec of packed histories. NumPy only: Spark writes with it, the reader reads with it.

An event is kept as the gap in visible seconds to the one before it, the lag of its own time
behind its visibility, an item index, and one byte each for surface, type and dwell.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
Int8 = npt.NDArray[np.int8]

DWELL_STEPS = 7.8  # per unit of ln(1 + ms): a step is 14 %, 127 is three hours


@dataclass(frozen=True)
class Events:
    """Events of users, one user after another; `offsets` (U+1) cut them (N events in all).

    `lags` are not read where only models ask.
    """

    offsets: Int64
    visible_ts: Int64
    lags: Int32 | None
    items: Int32
    surfaces: Int8
    types: Int8
    dwells: Int8

    @property
    def event_ts(self) -> Int64:
        """When the events happened, in seconds."""
        assert self.lags is not None, "the lags were not read"
        return self.visible_ts - self.lags


def dwell_byte(dwell_ms: npt.NDArray[np.float64]) -> Int8:
    """A dwell time in milliseconds as one of 127 logarithmic steps; 0 is none (NaN)."""
    steps = np.rint(np.log1p(np.nan_to_num(dwell_ms, nan=0.0)) * DWELL_STEPS)
    return np.where(np.isnan(dwell_ms), 0, np.clip(steps, 1, 127)).astype(np.int8)


def dwell_ms(byte: Int8) -> npt.NDArray[np.float64]:
    """The middle of a step of `dwell_byte`, in milliseconds; NaN for none."""
    return np.where(byte == 0, np.nan, np.expm1(byte.astype(np.float64) / DWELL_STEPS))


def gaps(visible_ts: Int64, starts: Int64) -> Int32:
    """Seconds to the event before; 0 at each start of a run."""
    gap = np.diff(visible_ts, prepend=visible_ts[:1])
    gap[starts] = 0
    return gap.astype(np.int32)


def visible_from(first_ts: Int64, gaps: Int32, offsets: Int64) -> Int64:
    """The inverse of `gaps`: runs are cut by `offsets` (R+1) and start at `first_ts` (R)."""
    lengths = np.diff(offsets)
    total = np.cumsum(gaps, dtype=np.int64)
    before = np.concatenate(([0], total))[offsets[:-1]]
    return total + np.repeat(first_ts - before, lengths)
