"""Recency features in numpy and torch follow the definition in features/recency.py."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from features.recency import (
    NO_EVENT_AGE,
    PHASE_BUCKETS,
    RecencyFeatures,
    age_bucket_of,
    phase_bucket_of,
    recency_of,
)
from ranking.inputs.recency_features import recency_features
from training.data.matching import match_by_attribute
from training.data.matching import recency_features as training_recency_features
from training.model.history import search as torch_recency
from training.model.history.events import age_bucket

NUM_TYPES = 3
Event = tuple[int, int, int]  # attribute value, event type, age in seconds
EVENTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, NUM_TYPES - 1), st.integers(1, 50)), max_size=6
)
ROUNDING = 1e-4  # tolerance of float32 logarithms


@given(
    st.lists(EVENTS, min_size=1, max_size=4),
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), min_size=4, max_size=4),
)
def test_serving_and_training_compute_the_defined_recency_of_random_histories(
    histories: list[list[Event]], candidates: list[list[int]]
) -> None:
    histories = [sorted(events, key=lambda event: -event[2]) for events in histories]
    all_events = [event for events in histories for event in events]
    event_values, types, ages = np.array(all_events, np.int64).reshape(-1, 3).T
    offsets = np.concatenate(([0], np.cumsum([len(events) for events in histories])))
    pairs = [(request, value) for request in range(len(histories)) for value in candidates[request]]
    request_index, candidate_values = np.array(pairs, np.int64).T

    served = recency_features(
        candidate_values, request_index, event_values, offsets, types, ages, NUM_TYPES
    )
    for row, (request, value) in enumerate(pairs):
        for event_type in range(NUM_TYPES):
            matching = [
                age for v, t, age in histories[request] if v == value > 0 and t == event_type
            ]
            cell = row, event_type
            assert recency_of(matching) == RecencyFeatures(
                served.last_age[cell], served.span[cell], served.gap_count[cell]
            )

    matches = match_by_attribute(
        torch.from_numpy(candidate_values),
        torch.from_numpy(event_values),
        torch.from_numpy(request_index),
        torch.from_numpy(offsets),
    )
    trained = training_recency_features(
        matches, torch.from_numpy(types), torch.from_numpy(ages), NUM_TYPES
    )
    for name in ("last_age", "span", "gap_count"):
        by_candidate = getattr(trained, name)[matches.candidate_group].numpy()
        np.testing.assert_array_equal(getattr(served, name), by_candidate)


@given(st.integers(0, 10**9))
def test_ages_fall_into_the_defined_buckets(age: int) -> None:
    bucket = int(age_bucket(torch.tensor(age)))
    assert bucket in {age_bucket_of(age * (1 - ROUNDING)), age_bucket_of(age * (1 + ROUNDING))}


@given(
    st.integers(1, 10**8) | st.just(NO_EVENT_AGE),
    st.floats(0, 1e8, width=32, allow_subnormal=False) | st.just(0.0),
)
def test_phases_fall_into_the_defined_buckets(last_age: int, gap: float) -> None:
    bucket = int(torch_recency.phase_bucket(torch.tensor(last_age), torch.tensor(gap)))
    if last_age == NO_EVENT_AGE or gap == 0:
        assert bucket == PHASE_BUCKETS
    else:
        assert bucket in {
            phase_bucket_of(last_age * (1 - ROUNDING), gap),
            phase_bucket_of(last_age * (1 + ROUNDING), gap),
        }
