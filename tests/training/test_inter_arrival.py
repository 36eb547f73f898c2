"""Times between events of all users: a gap is counted once, by the first request to see it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from types import SimpleNamespace
from typing import cast

import torch
from hypothesis import given
from hypothesis import strategies as st

from training.data.batch import Batch, History
from training.data.matching import AttributeRecency, attribute_recency, match_by_attribute
from training.model.history.search import InterArrivalStats, RecencyEmbedding

DAY, NUM_TYPES, VALUES = 86_400, 3, 4


@dataclass(frozen=True)
class Event:
    """An event of a user; `time` is when it becomes visible."""

    user: int
    value: int
    type: int
    time: int


@dataclass(frozen=True)
class Request:
    """A request of a user for candidates with some attribute values."""

    user: int
    time: int
    values: tuple[int, ...]


def batch_of(requests: Sequence[Request], events: Sequence[Event]) -> Batch:
    """The requests with the events that are visible before them; only what the statistics read."""
    histories = [
        sorted((e for e in events if e.user == r.user and e.time < r.time), key=lambda e: e.time)
        for r in requests
    ]
    flat = [
        (event, r.time) for r, history in zip(requests, histories, strict=True) for event in history
    ]
    history = SimpleNamespace(
        offsets=torch.tensor([0, *torch.tensor([len(h) for h in histories]).cumsum(0).tolist()]),
        types=torch.tensor([e.type for e, _ in flat], dtype=torch.long),
        age_seconds=torch.tensor([now - e.time for e, now in flat], dtype=torch.long),
        item_categorical={"a": torch.tensor([e.value for e, _ in flat], dtype=torch.long)},
    )
    rows = [(number, value) for number, r in enumerate(requests) for value in r.values]
    fields = SimpleNamespace(
        request_index=torch.tensor([number for number, _ in rows]),
        as_of=torch.tensor([r.time for r in requests]),
        user_hash=torch.tensor([r.user for r in requests]),
        row_categorical={"a": torch.tensor([value for _, value in rows])},
        history=cast("History", history),
    )
    return cast("Batch", fields)


def recency_of(batch: Batch) -> AttributeRecency:
    history = batch.history
    matches = match_by_attribute(
        batch.row_categorical["a"], history.item_categorical["a"], batch.request_index,
        history.offsets,
    )  # fmt: skip
    return attribute_recency(matches, batch, NUM_TYPES)


def gaps_seen(
    requests: Sequence[Request], events: Sequence[Event]
) -> dict[tuple[int, int], list[int]]:
    """The gaps of each value and type that any request sees, each once."""
    seen = set()
    for request in requests:
        for value in set(request.values) - {0}:
            for event_type in range(NUM_TYPES):
                matching = sorted(
                    (e.time, number)
                    for number, e in enumerate(events)
                    if (e.user, e.value, e.type) == (request.user, value, event_type)
                    and e.time < request.time
                )
                for (first, _), (second, number) in pairwise(matching):
                    seen.add((value, event_type, number, second - first))
    gaps: dict[tuple[int, int], list[int]] = {}
    for value, event_type, _, gap in seen:
        gaps.setdefault((value, event_type), []).append(gap)
    return gaps


@given(
    st.lists(
        st.builds(
            Event, st.integers(0, 2), st.integers(0, VALUES - 1), st.integers(0, NUM_TYPES - 1),
            st.integers(1, 30),
        ),
        max_size=25,
    ),
    st.lists(
        st.builds(
            Request, st.integers(0, 2), st.integers(1, 35),
            st.lists(st.integers(0, VALUES - 1), min_size=1, max_size=3).map(tuple),
        ),
        min_size=1, max_size=8,
    ),
    st.randoms(),
)  # fmt: skip
def test_each_gap_is_counted_once_in_whatever_batches_and_order_requests_come(
    events: list[Event], requests: list[Request], random: Random
) -> None:
    stats = InterArrivalStats(VALUES, NUM_TYPES)
    shuffled = random.sample(requests, len(requests))
    while shuffled:
        size = random.randint(1, len(shuffled))
        batch, shuffled = batch_of(shuffled[:size], events), shuffled[size:]
        stats.update(recency_of(batch).gaps)
    expected = gaps_seen(requests, events)
    for value in range(VALUES):
        for event_type in range(NUM_TYPES):
            gaps = expected.get((value, event_type), [])
            assert stats.gap_count[value, event_type] == len(gaps)
            assert stats.total_span[value, event_type] == sum(gaps)
    again = batch_of(requests, events)
    before = stats.gap_count.clone()
    stats.update(recency_of(again).gaps)
    assert torch.equal(stats.gap_count, before)


def test_users_and_values_that_share_a_hash_count_no_gap_twice() -> None:
    """Slots are chosen so that all users share one: gaps may be lost, but not repeated."""
    stats = InterArrivalStats(VALUES, NUM_TYPES)
    stats.counted_until = torch.zeros(1, dtype=torch.int64)
    events = [Event(user, 1, 1, time) for user in (0, 1) for time in (10, 20, 30)]
    for time in (25, 35, 45):
        for user in (0, 1):
            batch = batch_of([Request(user, time, (1,))], events)
            stats.update(recency_of(batch).gaps)
    assert 2 <= stats.gap_count[1, 1] <= 4
    assert stats.total_span[1, 1] == 10 * stats.gap_count[1, 1]


def test_gaps_of_all_users_serve_a_user_without_gaps() -> None:
    """Events of type 1 were 25, 18, 11 and 7 days ago; another user had one, 7 days ago."""
    now = 100 * DAY
    ages = ((1, 25), (1, 18), (1, 11), (1, 7), (2, 3))
    events = [Event(0, 3, event_type, now - age * DAY) for event_type, age in ages]
    batch = batch_of([Request(0, now, (3, 2))], events)
    embedding = RecencyEmbedding(VALUES, 2, 4)
    torch.nn.init.normal_(embedding.population_phase.weight)
    rows = embedding(recency_of(batch))
    assert rows.shape == (2, 2, 4) and embedding.inter_arrival.gap_count[3, 1] == 3
    embedding.eval()
    single = batch_of([Request(1, now, (3, 2))], [Event(1, 3, 1, now - 7 * DAY)])
    torch.testing.assert_close(embedding(recency_of(single))[0, 0], rows[0, 0])
    assert embedding.inter_arrival.gap_count[3, 1] == 3
