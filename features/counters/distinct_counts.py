"""Distinct counts of events, estimated with HyperLogLog.

A value is hashed to one of the registers, which keeps the largest rank of its values: the position
of the lowest set bit of the rest of the hash. Registers of several sets of events are merged by
their maximum, so that those of a window follow from those of its parts, in any order and however
often an event is seen (Flajolet et al., "HyperLogLog", 2007).

The register and the rank of a value are one integer, its entry: `register * RANKS + rank`, and 0
for a missing value. Spark makes the same entries: see features/counters/key_prefixes.py.

N events, R ranges, M registers.
"""

from dataclasses import dataclass

import numpy as np

from etl.array_types import Bytes, Float64, Int64
from features.encoding.scalar import spark_xxhash64_of_integers
from features.ragged import reduce_ranges

REGISTER_BITS = 7
NUM_REGISTERS = 1 << REGISTER_BITS
RANKS = 64
# Powers of two down to 2^-MAX_RANK are added as integers of 64 bits, in any order.
MAX_RANK = 50
MISSING_ENTRY = 0
_BIAS_FACTOR = 0.7213 / (1 + 1.079 / NUM_REGISTERS)
_LARGEST_LINEAR_COUNT = 2.5 * NUM_REGISTERS
_REGISTERS_AT_ONCE = 8
_POWERS = 1 << (MAX_RANK - np.arange(MAX_RANK + 1, dtype=np.int64))


def entries_of(values: Int64) -> Int64:
    """The entries (N) of values, given as integers."""
    hashes = spark_xxhash64_of_integers(values)
    rest = hashes >> np.uint64(REGISTER_BITS)
    below_lowest_bit = (rest & (~rest + np.uint64(1))) - np.uint64(1)
    rank = np.minimum(np.bitwise_count(below_lowest_bit).astype(np.int64) + 1, MAX_RANK)
    register = (hashes & np.uint64(NUM_REGISTERS - 1)).astype(np.int64)
    return register * RANKS + rank


def estimate_distinct(registers: Bytes) -> Float64:
    """The estimated number of values of sets (...), from their registers (..., M)."""
    return _estimate(_POWERS[registers].sum(-1), (registers == 0).sum(-1))


@dataclass(frozen=True)
class SortedEntries:
    """Entries (N) of values, sorted by their position on an axis of time."""

    position: Int64
    entries: Int64

    def estimate_distinct(self, first: Int64, end: Int64) -> Float64:
        """The estimated number of distinct values in rows first:end of each range (R)."""
        inverse_sum, num_empty = np.zeros((2, len(first)), np.int64)
        register, rank = np.divmod(self.entries, RANKS)
        for start in range(0, NUM_REGISTERS, _REGISTERS_AT_ONCE):
            row = np.flatnonzero(register // _REGISTERS_AT_ONCE * _REGISTERS_AT_ONCE == start)
            ranks = np.zeros((len(self.entries), _REGISTERS_AT_ONCE), np.uint8)
            ranks[row, register[row] - start] = rank[row]
            registers = reduce_ranges(np.maximum, ranks, first, end, empty=np.uint8(0))
            inverse_sum += _POWERS[registers].sum(1)
            num_empty += (registers == 0).sum(1)
        return _estimate(inverse_sum, num_empty)


def _estimate(inverse_sum: Int64, num_empty: Int64) -> Float64:
    """The estimate from sums of 2^(MAX_RANK - rank) over registers and numbers of empty ones."""
    raw = _BIAS_FACTOR * NUM_REGISTERS**2 * 2.0**MAX_RANK / inverse_sum
    linear = NUM_REGISTERS * np.log(NUM_REGISTERS / np.maximum(num_empty, 1))
    is_linear = (raw <= _LARGEST_LINEAR_COUNT) & (num_empty > 0)
    return np.where(is_linear, linear, raw)
