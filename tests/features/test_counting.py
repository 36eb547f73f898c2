import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from features.counting import counts_before, seen_before

WINDOWS, TYPES = (5, 40), (1, 2)
events = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(1, 3)), max_size=40)
queries = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 60)), min_size=1, max_size=20)


@settings(max_examples=300)
@given(events, queries)
def test_counts_are_those_of_a_loop(happened: list, asked: list) -> None:
    e = np.array(happened, np.int64).reshape(-1, 3)
    q = np.array(asked, np.int64).reshape(-1, 2)
    seen = seen_before(e[:, 0], e[:, 1], q[:, 0], q[:, 1])
    counts = counts_before(e[:, 0], e[:, 1], e[:, 2], q[:, 0], q[:, 1], WINDOWS, TYPES)
    for row, (key, now) in enumerate(asked):
        expected = [
            sum(k == key and t == type_ and now - window <= ts < now for k, ts, t in happened)
            for window in WINDOWS
            for type_ in TYPES
        ]
        assert counts[row].tolist() == expected
        assert seen[row] == sum(k == key and ts < now for k, ts, _ in happened)
