"""Point-in-time counts against a loop implementation."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from features.counters import count_all_before, windowed_counts_before

WINDOWS, TYPES = (5, 40), (1, 2)
events = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(1, 3)), max_size=40)
queries = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 60)), min_size=1, max_size=20)


@settings(max_examples=300)
@given(events, queries)
def test_counts_equal_those_of_a_loop(
    events: list[tuple[int, int, int]], queries: list[tuple[int, int]]
) -> None:
    event_key, event_ts, event_type = np.array(events, np.int64).reshape(-1, 3).T
    query_key, query_ts = np.array(queries, np.int64).reshape(-1, 2).T
    totals = count_all_before(event_key, event_ts, query_key, query_ts)
    counts = windowed_counts_before(
        event_key, event_ts, event_type, query_key, query_ts, WINDOWS, TYPES
    )
    for row, (key, now) in enumerate(queries):
        expected = [
            sum(k == key and t == type_ and now - window <= ts < now for k, ts, t in events)
            for window in WINDOWS
            for type_ in TYPES
        ]
        assert counts[row].tolist() == expected
        assert totals[row] == sum(k == key and ts < now for k, ts, _ in events)
