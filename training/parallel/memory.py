"""Memory that a step frees is kept for the next step."""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST = 2**31 - 1


def keep_freed_memory() -> None:
    """Have glibc reuse large blocks; by default it gives each back to the system when it is freed.

    Every step takes the same large blocks again, and the system must fill each page with zeros
    anew: a tenth of a Wukong's step on a CPU. Does nothing where there is no glibc.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt:
            mallopt(M_MMAP_THRESHOLD, LARGEST)
            mallopt(M_TRIM_THRESHOLD, LARGEST)
