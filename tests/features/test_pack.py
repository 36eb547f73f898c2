import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from etl.tables.contracts import HISTORY_PLANES
from features.groups import whole_groups
from features.history.pack import dwell_byte, dwell_ms, gaps, visible_from
from features.history.planes import COLUMNS, join, planes, split


@given(st.lists(st.lists(st.integers(0, 2**33), min_size=1, max_size=6), min_size=1, max_size=6))
def test_visible_seconds_round_trip(runs: list[list[int]]) -> None:
    runs = [sorted(run) if run[-1] - run[0] < 2**31 else [run[0]] for run in map(sorted, runs)]
    visible = np.concatenate([np.array(run, np.int64) for run in runs])
    offsets = np.concatenate(([0], np.cumsum([len(run) for run in runs])))
    packed = gaps(visible, offsets[:-1])
    assert visible_from(visible[offsets[:-1]], packed, offsets).tolist() == visible.tolist()


@given(st.lists(st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 3), min_size=1, max_size=5)))
def test_planes_give_back_what_they_were_made_of(runs: list[list[int]]) -> None:
    values = np.array([value for run in runs for value in run], np.int32)
    lengths = np.array([len(run) for run in runs], np.int64)
    made = split("gaps", values, np.concatenate(([0], np.cumsum(lengths))))
    assert list(made) == planes("gaps")
    assert join("gaps", made, lengths).tolist() == values.tolist()
    for column in made.values():
        assert all(set(run) != {0} for run in column.to_pylist()), "zeros are not stored"
    table = pa.table(made)
    if len(runs) > 1:
        last = {name: table.slice(1)[name].combine_chunks() for name in made}
        assert join("gaps", last, lengths[1:]).tolist() == values[lengths[0] :].tolist()


@given(st.floats(1, 1e7))
def test_a_dwell_time_survives_within_a_step(ms: float) -> None:
    assert abs(np.log1p(dwell_ms(dwell_byte(np.array([ms])))[0]) - np.log1p(ms)) <= 0.5 / 7.8 + 1e-9


def test_no_dwell_stays_none() -> None:
    assert np.isnan(dwell_ms(dwell_byte(np.array([np.nan]))))[0]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.integers(1, 7))
def test_groups_are_never_split_and_nothing_is_lost(sizes: list[int], cut: int) -> None:
    keys = np.repeat(np.arange(len(sizes)), sizes)
    table = pa.table({"key": keys, "row": np.arange(len(keys))})
    batches = table.to_batches(max_chunksize=cut)
    out = list(whole_groups(iter(batches), "key"))
    assert pa.concat_tables(out)["row"].to_pylist() == list(range(len(keys)))
    owners = [set(part["key"].to_pylist()) for part in out]
    assert sum(map(len, owners)) == len(set(keys.tolist()))


def test_the_table_has_all_planes() -> None:
    assert HISTORY_PLANES == COLUMNS
