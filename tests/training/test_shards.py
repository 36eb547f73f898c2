"""Round-robin over shards, and the batches of several workers as one stream."""

from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etl.spec.units import date_range
from etl.tables.lake import Lake
from tests.conftest import FIRST, LAST
from training.data.batch import Shuffle, batch_digest
from training.data.history_selection import EventFilter, HistorySelection, HistorySelector
from training.data.label_window import ALL_LABELS
from training.data.reader import ExampleReader
from training.data.shards import (
    Epoch,
    RoundRobin,
    ShardDataset,
    read_epoch,
    round_robin_order,
    steps_to_pass_end,
)

LENGTHS = st.lists(st.integers(0, 8), max_size=5)


@given(LENGTHS)
def test_each_round_takes_an_item_of_every_stream_that_is_not_exhausted(lengths: list[int]) -> None:
    streams = {key: iter([(key, n) for n in range(size)]) for key, size in enumerate(lengths)}
    items = list(RoundRobin(streams))
    rounds = sorted((n, key) for key, size in enumerate(lengths) for n in range(size))
    assert items == [(key, n) for n, key in rounds]
    assert round_robin_order(lengths) == [key for key, _ in items]


@given(LENGTHS, st.integers(0, 40))
def test_an_interrupted_round_is_resumed(lengths: list[int], steps: int) -> None:
    order = round_robin_order(lengths)
    consumed = {key: order[:steps].count(key) for key in range(len(lengths))}
    rest = {key: iter([key] * (size - consumed[key])) for key, size in enumerate(lengths)}
    resumed = RoundRobin(rest, consumed)
    assert list(resumed) == order[steps:]
    assert [resumed.consumed[key] for key in range(len(lengths))] == lengths


@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=5),
    shares=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), max_size=4),
)
def test_each_batch_is_trained_on_once_with_any_number_of_processes(
    lengths: list[int], shares: list[tuple[int, int]]
) -> None:
    """Some processes make some steps, others resume, and a single one finishes."""
    batches = [[(shard, n) for n in range(length)] for shard, length in enumerate(lengths)]
    consumed = dict.fromkeys(range(len(lengths)), 0)
    seen: list[tuple[int, int]] = []
    for world, steps in [*shares, (1, sum(lengths))]:
        after = dict(consumed)
        for rank in range(world):
            shards = range(rank, len(lengths), world)
            streams = {n: iter(batches[n][consumed[n] :]) for n in shards}
            round_robin = RoundRobin(streams, consumed)
            seen += islice(round_robin, steps)
            after |= {n: round_robin.consumed[n] for n in streams}
        consumed = after
    assert sorted(seen) == sorted(batch for shard in batches for batch in shard)


@pytest.fixture(scope="module")
def epoch() -> Epoch:
    return Epoch(list(date_range(FIRST, LAST)), ALL_LABELS, 200, Shuffle(5))


def test_workers_give_the_stream_of_their_shards_from_any_position(
    lake: Lake, epoch: Epoch
) -> None:
    reader = ExampleReader.latest(lake, "behaviour", 16)
    shards = epoch.split(2)
    streams = {n: iter(ShardDataset(reader, shard)) for n, shard in enumerate(shards)}
    expected = [batch_digest(batch) for batch in RoundRobin(streams)]
    assert [batch_digest(batch) for batch in read_epoch(reader, epoch, 2)] == expected
    skip = len(expected) - 3
    rest = replace(epoch, skip_batches=skip)
    assert [batch_digest(batch) for batch in read_epoch(reader, rest, 2)] == expected[skip:]
    alone = {i for batch in epoch.batches(reader) for i in batch.impression_ids}
    selector = HistorySelector((), (EventFilter(4),), 1, 2)
    selected = read_epoch(reader, replace(epoch, skip_batches=skip, selector=selector), 2)
    for batch in selected:
        assert isinstance(batch.selection, HistorySelection)
        assert selector(batch).positions.equal(batch.selection.positions)
    together = {i for shard in shards for b in shard.batches(reader) for i in b.impression_ids}
    assert together == alone


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(any), st.integers(1, 3), st.data()
)
def test_a_resumed_pass_ends_when_its_last_shard_is_through_it(
    sizes: list[int], passes: int, data: st.DataObject
) -> None:
    """One process goes on with the shards of several, which took a batch of each at once."""
    stopped = data.draw(st.integers(0, passes * max(sizes)))
    consumed = [min(stopped, passes * size) for size in sizes]
    streams = {n: iter(range(done, passes * sizes[n])) for n, done in enumerate(consumed)}
    batches = RoundRobin(streams, dict(enumerate(consumed)))
    ends: dict[int, int] = {}
    for step in range(1 + passes * sum(sizes) - sum(consumed)):
        for number in range(1, passes + 1):
            if all(batches.consumed[n] >= number * size for n, size in enumerate(sizes)):
                ends.setdefault(number, step)
        next(batches, None)
    shards = list(zip(sizes, consumed, strict=True))
    for number in range(1, passes + 1):
        steps = steps_to_pass_end(shards, number, passes)
        if stopped > number * max(sizes):
            assert steps < 0
        else:
            assert ends[number] <= steps < ends[number] + len(sizes)
    assert steps_to_pass_end([(50, 30), (50, 30)], 1, 2) == 40
