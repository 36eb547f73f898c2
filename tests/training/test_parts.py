import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from training.data.parts import MOST_EVENTS, Shuffle, cut, deal

SEEDS = st.integers(0, 2**32 - 1)


def made(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and events of requests; a few users have most events, as in any log."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 3000))
    return rng.integers(1, 9, n), np.minimum(rng.pareto(0.7, n) * 20, 2048).astype(np.int64)


@given(seed=SEEDS, rows=st.integers(1, 500), order=st.sampled_from([None, 0, 1]))
def test_every_request_is_in_one_part(seed: int, rows: int, order: int | None) -> None:
    sizes, events = made(seed)
    parts = Shuffle(order).parts(sizes, events, rows)
    together = np.concatenate(parts)
    assert sorted(together) == list(range(len(sizes)))
    if order is None:
        assert together.tolist() == sorted(together)
    again = Shuffle(order).parts(sizes, events, rows)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@given(seed=SEEDS)
def test_heavy_requests_are_dealt_with_light_ones(seed: int) -> None:
    """Parts are as many, and their costs differ by less than the costliest request."""
    sizes, events = made(seed)
    cost = sizes + events
    count = max(1, len(sizes) // 40)
    parts = deal(np.arange(len(sizes)), cost, count)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    sums = [int(cost[part].sum()) for part in parts]
    assert max(sums) - min(sums) <= cost.max()


def test_parts_of_much_history_have_fewer_rows() -> None:
    sizes, events = np.full(4000, 2), np.full(4000, 2048)
    for shuffle in (Shuffle(None), Shuffle(0)):
        parts = shuffle.parts(sizes, events, 2048)
        assert max(int(events[part].sum()) for part in parts) <= MOST_EVENTS + 2048
    few = Shuffle(0).parts(sizes, np.zeros(4000, int), 2048)
    assert [len(part) for part in few] == [1000] * 4 and len(parts) > 4


def test_a_cut_keeps_the_order() -> None:
    assert [p.tolist() for p in cut(np.arange(6), np.array([1, 1, 1, 1, 1, 5]), 2)] == [
        [0, 1, 2, 3, 4],
        [5],
    ]
