"""The bids as of a time, compared with a naive loop."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ranking.scoring.bids import BidTable
from ranking.scoring.candidates import NO_ADVERTISER

VERSION = st.tuples(st.integers(1, 4), st.integers(0, 9), st.floats(0, 5))


@given(
    st.lists(VERSION, max_size=20, unique_by=lambda v: v[:2]),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 11)), max_size=20),
)
def test_the_latest_bid_strictly_before_the_request_is_used(
    versions: list[tuple[int, int, float]], queries: list[tuple[int, int]]
) -> None:
    items = np.array([item for item, _, _ in versions], np.int64)
    valid_from = np.array([time for _, time, _ in versions], np.int64)
    bids = np.array([bid for _, _, bid in versions], np.float64)
    goals = np.array([f"{item}-{time}" for item, time, _ in versions], object)
    table = BidTable(items, valid_from, bids, goals, bids / 2, advertisers=items + 1)

    query_items, query_times = np.array(queries, np.int64).reshape(-1, 2).T
    found = table.as_of(query_items, query_times)
    columns = found.bids, found.goals, found.target_roas, found.advertisers
    rows = zip(*columns, strict=True)
    for (item, time), row in zip(queries, rows, strict=True):
        earlier = [version for version in versions if version[0] == item and version[1] < time]
        newest = max(earlier, key=lambda version: version[1], default=None)
        if newest is None:
            assert row == (0.0, None, 0.0, NO_ADVERTISER)
        else:
            assert row == (newest[2], f"{item}-{newest[1]}", newest[2] / 2, item + 1)
