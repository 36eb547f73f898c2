"""The history codec: encoding is lossless except for dwell times, and zeros are not stored."""

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from etl.tables.schemas import HISTORY_BYTE_PLANES
from features.history.codec import (
    DWELL_STEPS_PER_LOG_MS,
    NUMBER_STEPS_PER_LOG,
    PLANE_COLUMNS,
    ZERO_CODE,
    delta_decode,
    delta_encode,
    dequantize_dwell,
    join_byte_planes,
    plane_columns,
    quantize_dwell,
    quantize_number,
    split_byte_planes,
)
from features.ragged import regroup_batches


@given(st.lists(st.lists(st.integers(0, 2**33), min_size=1, max_size=6), min_size=1, max_size=6))
def test_visible_seconds_round_trip(runs: list[list[int]]) -> None:
    runs = [sorted(run) if run[-1] - run[0] < 2**31 else [run[0]] for run in map(sorted, runs)]
    visible = np.concatenate([np.array(run, np.int64) for run in runs])
    offsets = np.concatenate(([0], np.cumsum([len(run) for run in runs])))
    encoded = delta_encode(visible, offsets[:-1])
    assert delta_decode(visible[offsets[:-1]], encoded, offsets).tolist() == visible.tolist()


@given(st.lists(st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 3), min_size=1, max_size=5)))
def test_byte_planes_round_trip_and_store_no_zero_runs(runs: list[list[int]]) -> None:
    values = np.array([value for run in runs for value in run], np.int32)
    lengths = np.array([len(run) for run in runs], np.int64)
    planes = split_byte_planes("gaps", values, np.concatenate(([0], np.cumsum(lengths))))
    assert list(planes) == plane_columns("gaps")
    assert join_byte_planes("gaps", planes, lengths).tolist() == values.tolist()
    for column in planes.values():
        assert all(set(run) != {0} for run in column.to_pylist()), "zeros are not stored"
    table = pa.table(planes)
    if len(runs) > 1:
        sliced = {name: table.slice(1)[name].combine_chunks() for name in planes}
        joined = join_byte_planes("gaps", sliced, lengths[1:])
        assert joined.tolist() == values[lengths[0] :].tolist()


@given(st.floats(1, 1e7))
def test_a_dwell_time_is_stored_to_within_half_a_step(dwell_ms: float) -> None:
    (decoded,) = dequantize_dwell(quantize_dwell(np.array([dwell_ms])))
    error = abs(np.log1p(decoded) - np.log1p(dwell_ms))
    assert error <= 0.5 / DWELL_STEPS_PER_LOG_MS + 1e-9


def test_a_missing_dwell_time_stays_missing() -> None:
    assert np.isnan(dequantize_dwell(quantize_dwell(np.array([np.nan]))))[0]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.integers(1, 7))
def test_regrouped_batches_split_no_group_and_lose_no_row(
    sizes: list[int], batch_size: int
) -> None:
    keys = np.repeat(np.arange(len(sizes)), sizes)
    table = pa.table({"key": keys, "row": np.arange(len(keys))})
    batches = table.to_batches(max_chunksize=batch_size)
    regrouped = list(regroup_batches(iter(batches), "key"))
    assert pa.concat_tables(regrouped)["row"].to_pylist() == list(range(len(keys)))
    keys_by_table = [set(part["key"].to_pylist()) for part in regrouped]
    assert sum(map(len, keys_by_table)) == len(set(keys.tolist()))


def test_the_history_table_has_all_planes_of_the_codec() -> None:
    assert HISTORY_BYTE_PLANES == PLANE_COLUMNS


@given(st.lists(st.none() | st.floats(-1e9, 1e9), max_size=50))
def test_quantized_numbers_keep_their_order_and_sign(values: list[float | None]) -> None:
    """Steps of 18 %, 0 where missing; numbers beyond 1e9 are at an end of the scale."""
    numbers = np.array([np.nan if value is None else value for value in values], np.float64)
    codes = quantize_number(numbers).astype(np.int64)
    assert [code == 0 for code in codes] == [value is None for value in values]
    is_known = ~np.isnan(numbers)
    order = np.argsort(numbers[is_known])
    assert (np.diff(codes[is_known][order]) >= 0).all()
    steps = codes[is_known] - ZERO_CODE
    assert (steps * numbers[is_known] >= 0).all()
    magnitude = 1 + np.abs(numbers[is_known])
    decoded = np.exp(np.abs(steps) / NUMBER_STEPS_PER_LOG)
    assert (np.abs(np.log(decoded / magnitude)) <= 0.5001 * np.log(1.18)).all()
    assert quantize_number(np.array([-np.inf, 0, np.inf])).tolist() == [1, ZERO_CODE, 255]
