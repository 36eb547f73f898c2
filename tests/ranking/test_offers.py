import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ranking.auction import NO_ADVERTISER
from ranking.offers import Offers

VERSION = st.tuples(st.integers(1, 4), st.integers(0, 9), st.floats(0, 5))


@given(
    st.lists(VERSION, max_size=20, unique_by=lambda v: v[:2]),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 11)), max_size=20),
)
def test_the_newest_offer_strictly_before_holds(
    versions: list[tuple[int, int, float]], asked: list[tuple[int, int]]
) -> None:
    item, since, bid = (np.array(c) for c in zip(*versions, strict=True)) if versions else [[]] * 3
    goals = np.array([f"{i}-{t}" for i, t, _ in versions], object)
    items = np.asarray(item, np.int64)
    offers = Offers(
        items, np.asarray(since, np.int64), np.asarray(bid, np.float64), goals, items + 1
    )
    queries = np.array(asked, np.int64).reshape(-1, 2)
    found = offers.at(queries[:, 0], queries[:, 1])
    for (i, t), b, goal, advertiser in zip(asked, *found, strict=True):
        held = [v for v in versions if v[0] == i and v[1] < t]
        newest = max(held, key=lambda v: v[1], default=None)
        nothing = (0.0, None, NO_ADVERTISER)
        assert (b, goal, advertiser) == (
            (newest[2], f"{i}-{newest[1]}", i + 1) if newest else nothing
        )
