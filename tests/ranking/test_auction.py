import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ranking.auction import expected_value, order


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.floats(0.1, 10))
def test_the_ranking_is_by_bid_times_probability(
    lake_spec, chances: list[float], bid: float
) -> None:
    p = np.tile(np.array(chances)[:, None], (1, len(lake_spec.objectives)))
    bids = [bid * (i + 1) for i in range(len(chances))]
    values = expected_value(lake_spec, "feed", p, bids, ["sales"] * len(chances))
    np.testing.assert_allclose(values, np.array(bids) * chances)
    ranked = order(p, values)
    assert [r.place for r in ranked] == list(range(len(chances)))
    assert all(a.expected_value >= b.expected_value for a, b in itertools.pairwise(ranked))
