import pytest
from hypothesis import given
from hypothesis import strategies as st

from etl.spec.units import each_day
from etl.tables.lake import Lake
from tests.conftest import FIRST, LAST
from training.data.digest import digest
from training.data.lanes import Lane, Pass, in_turn, read, turns
from training.data.parts import Shuffle
from training.data.reader import Reader
from training.data.ripened import EVERYTHING


@given(st.lists(st.integers(0, 8), max_size=5))
def test_turns_are_those_that_are_taken(lengths: list[int]) -> None:
    streams = [iter([(lane, n) for n in range(size)]) for lane, size in enumerate(lengths)]
    taken = list(in_turn(streams))
    assert [lane for lane, _ in taken] == turns(lengths)
    assert all([n for lane, n in taken if lane == own] == list(range(size))
               for own, size in enumerate(lengths))  # fmt: skip


@pytest.fixture(scope="module")
def asked() -> Pass:
    return Pass(list(each_day(FIRST, LAST)), EVERYTHING, 200, Shuffle(5), (0, 1))


def test_workers_give_the_stream_of_their_lanes_from_any_place(lake: Lake, asked: Pass) -> None:
    reader = Reader.newest(lake, "behaviour", 16)
    lanes = [Pass(asked.days, asked.ripened, asked.rows, asked.shuffle, (n, 2)) for n in range(2)]
    here = [digest(batch) for batch in in_turn([iter(Lane(reader, lane)) for lane in lanes])]
    assert [digest(batch) for batch in read(reader, asked, 2)] == here
    skip = len(here) - 3
    rest = Pass(asked.days, asked.ripened, asked.rows, asked.shuffle, (0, 1), skip)
    assert [digest(batch) for batch in read(reader, rest, 2)] == here[skip:]
    alone = {i for batch in asked.of(reader) for i in batch.impressions}
    assert {i for lane in lanes for batch in lane.of(reader) for i in batch.impressions} == alone
