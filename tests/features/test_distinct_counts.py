"""Distinct counts have the error of HyperLogLog, and merge in any order."""

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from features.counters.distinct_counts import (
    NUM_REGISTERS,
    RANKS,
    SortedEntries,
    entries_of,
    estimate_distinct,
)
from features.encoding.scalar import SPARK_XXHASH64_SEED, spark_xxhash64_of_integers
from features.reference import hyperloglog_estimate

INT64 = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(INT64, max_size=20))
def test_integers_are_hashed_as_by_the_library(values: list[int]) -> None:
    expected = [
        xxhash.xxh64_intdigest(value.to_bytes(8, "little", signed=True), seed=SPARK_XXHASH64_SEED)
        for value in values
    ]
    assert spark_xxhash64_of_integers(np.array(values, np.int64)).tolist() == expected


@given(st.lists(INT64, max_size=50))
def test_an_estimate_depends_on_the_set_of_values_only(values: list[int]) -> None:
    """In any order, however often each is seen, and as the maximum of the registers of parts."""
    entries = entries_of(np.array(values, np.int64))
    repeated = np.random.default_rng(len(values)).permutation(np.repeat(entries, 3))
    stored = SortedEntries(np.arange(len(repeated)), repeated)
    ends = np.array([0, len(repeated)])
    estimates = stored.estimate_distinct(np.array([0, 0]), ends).tolist()
    registers = np.zeros((2, NUM_REGISTERS), np.uint8)
    register, rank = np.divmod(entries, RANKS)
    np.maximum.at(registers, (np.arange(len(entries)) % 2, register), rank.astype(np.uint8))
    assert estimates == [0, estimate_distinct(registers.max(0))]
    assert estimates[1] == pytest.approx(hyperloglog_estimate(set(values)), rel=1e-12)


@pytest.mark.parametrize("num_values", [3, 30, 300, 3000, 100_000])
def test_estimates_have_the_standard_error_of_hyperloglog(num_values: int) -> None:
    rng, errors = np.random.default_rng(num_values), []
    for _ in range(100):
        entries = entries_of(rng.integers(-(2**63), 2**63 - 1, num_values))
        stored = SortedEntries(np.arange(num_values), entries)
        estimate = stored.estimate_distinct(np.array([0]), np.array([num_values]))[0]
        errors.append(estimate / num_values - 1)
    standard_error = 1.04 / NUM_REGISTERS**0.5
    assert np.sqrt(np.mean(np.square(errors))) < 1.2 * standard_error
    assert abs(np.mean(errors)) < 0.5 * standard_error
