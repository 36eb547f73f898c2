"""The recency features of features/recency.py in numpy, because serving has no torch.

B candidates of R requests, N events, T event types; column 0 of T + 1 is the unknown event type.
"""

import numpy as np

from etl.array_types import Int64
from features.recency import NO_EVENT_AGE, RecencyFeatures


class RecencyArrays(RecencyFeatures[Int64]):
    """Recency by event type (…, T + 1)."""


def recency_features(
    candidate_values: Int64,
    request_index: Int64,
    event_values: Int64,
    offsets: Int64,
    types: Int64,
    age_seconds: Int64,
    num_types: int,
) -> RecencyArrays:
    """Recency of the events that share an attribute value with each candidate (B, num_types).

    Args:
        candidate_values: Attribute value of each candidate (B); 0 matches nothing.
        request_index: Request of each candidate (B).
        event_values: Attribute value of each event (N).
        offsets: Where the events of each request begin (R + 1).
        types: Type of each event (N).
        age_seconds: Age of each event (N).
        num_types: Number of event types, with the unknown one.
    """
    stride = 1 + int(max(candidate_values.max(initial=0), event_values.max(initial=0)))
    candidate_key = request_index * stride + candidate_values
    keys, group = np.unique(candidate_key, return_inverse=True)
    event_request = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    event_key = event_request * stride + event_values
    event_group = np.minimum(np.searchsorted(keys, event_key), len(keys) - 1)
    matches = (keys[event_group] == event_key) & (event_values > 0)

    cell = event_group[matches] * num_types + types[matches]
    ages = age_seconds[matches]
    last = np.full(len(keys) * num_types, NO_EVENT_AGE)
    first, count = np.zeros_like(last), np.zeros_like(last)
    np.minimum.at(last, cell, ages)
    np.maximum.at(first, cell, ages)
    np.add.at(count, cell, 1)
    gap_count = np.maximum(count - 1, 0)
    span = np.where(gap_count > 0, first - last, 0)

    def by_candidate(values: Int64) -> Int64:
        return values.reshape(len(keys), num_types)[group]

    return RecencyArrays(by_candidate(last), by_candidate(span), by_candidate(gap_count))
