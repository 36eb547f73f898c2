"""Packing of requests into batches: completely, and at even cost."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from etl.array_types import Int64
from training.data.batch import MAX_BATCH_EVENTS, Shuffle, balance_by_cost, split_by_cost

SEEDS = st.integers(0, 2**32 - 1)


def random_requests(seed: int) -> tuple[Int64, Int64]:
    """Rows and events of requests; a few users have most events, as in any log."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 3000))
    return rng.integers(1, 9, n), np.minimum(rng.pareto(0.7, n) * 20, 2048).astype(np.int64)


@given(seed=SEEDS, rows=st.integers(1, 500), order=st.sampled_from([None, 0, 1]))
def test_every_request_is_in_one_batch(seed: int, rows: int, order: int | None) -> None:
    sizes, events = random_requests(seed)
    batches = Shuffle(order).split(sizes, events, rows)
    assert all(len(batch) for batch in batches)
    requests = np.concatenate(batches).tolist()
    assert sorted(requests) == list(range(len(sizes)))
    if order is None:
        assert requests == sorted(requests)
    again = Shuffle(order).split(sizes, events, rows)
    assert all(np.array_equal(a, b) for a, b in zip(batches, again, strict=True))


@given(seed=SEEDS)
def test_balanced_parts_are_even_in_size_and_cost(seed: int) -> None:
    """Their costs differ by less than the costliest request."""
    sizes, events = random_requests(seed)
    cost = sizes + events
    count = max(1, len(sizes) // 40)
    parts = balance_by_cost(np.arange(len(sizes)), cost, count)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    sums = [int(cost[part].sum()) for part in parts]
    assert max(sums) - min(sums) <= cost.max()


def test_batches_with_long_histories_have_fewer_rows() -> None:
    sizes, events = np.full(4000, 2), np.full(4000, 2048)
    for shuffle in (Shuffle(None), Shuffle(0)):
        batches = shuffle.split(sizes, events, 2048)
        assert len(batches) > 4
        assert max(int(events[batch].sum()) for batch in batches) <= MAX_BATCH_EVENTS + 2048
    short_histories = Shuffle(0).split(sizes, np.zeros(4000, int), 2048)
    assert [len(batch) for batch in short_histories] == [1000] * 4


def test_split_by_cost_keeps_the_order() -> None:
    parts = split_by_cost(np.arange(6), np.array([1, 1, 1, 1, 1, 5]), 2)
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3, 4], [5]]
