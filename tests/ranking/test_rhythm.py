"""When a user last dealt with what is like a candidate: brute force, and GEM's own."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ranking.rhythm import NEVER, rhythm
from training.model.matching import match
from training.model.recency import rhythm as gems

KINDS = 3
EVENT = st.tuples(st.integers(0, 3), st.integers(0, KINDS - 1), st.integers(1, 50))


@given(
    st.lists(st.lists(EVENT, max_size=6), min_size=1, max_size=4),
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), min_size=4, max_size=4),
)
def test_it_is_what_a_loop_finds_and_what_gem_reads(
    histories: list[list[tuple[int, int, int]]], candidates: list[list[int]]
) -> None:
    histories = [sorted(events, key=lambda e: -e[2]) for events in histories]
    events = [event for events in histories for event in events]
    seen, types, ages = np.array(events, np.int64).reshape(-1, 3).T
    offsets = np.concatenate(([0], np.cumsum([len(h) for h in histories])))
    asked = [(r, own) for r in range(len(histories)) for own in candidates[r]]
    request, own = np.array(asked, np.int64).T
    found = rhythm(own, request, seen, offsets, types, ages, KINDS)
    for n, (r, value) in enumerate(asked):
        for kind in range(KINDS):
            like = [a for v, t, a in histories[r] if v == value and t == kind and v > 0]
            assert found.last[n, kind] == (min(like) if like else NEVER)
            assert found.span[n, kind] == (max(like) - min(like) if like else 0)
            assert found.gaps[n, kind] == max(0, len(like) - 1)
    told = (torch.from_numpy(x) for x in (own, seen, request, offsets))
    matches = match(*told)
    other = gems(matches, torch.from_numpy(types), torch.from_numpy(ages), KINDS)
    for name in ("last", "span", "gaps"):
        theirs = getattr(other, name)[matches.group_of].numpy()
        np.testing.assert_array_equal(getattr(found, name), theirs)
