"""Numbers between -1 and 1 in four bits each."""

import numpy as np
import numpy.typing as npt

HALF = 8  # levels below zero, and as many from it on
Bytes = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]


def packed(numbers: Float32) -> Bytes:
    """Numbers (…, Z), Z even, as bytes (…, Z / 2)."""
    level = np.clip(np.rint(numbers * HALF), -HALF, HALF - 1).astype(np.int8) + HALF
    level = level.astype(np.uint8)
    return np.asarray(level[..., ::2] << 4 | level[..., 1::2])


def unpacked(stored: Bytes) -> Float32:
    """Bytes (…, Z / 2) as numbers (…, Z)."""
    levels = np.stack((stored >> 4, stored & 15), -1).reshape(*stored.shape[:-1], -1)
    return (levels.astype(np.float32) - np.float32(HALF)) / np.float32(HALF)
