"""Positions of ragged runs, without a loop over them."""

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]


def ranges(start: Int64, stop: Int64) -> Int64:
    """start[0], start[0]+1, …, stop[0]-1, start[1], …"""
    lengths = stop - start
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(start - (ends - lengths), lengths)
