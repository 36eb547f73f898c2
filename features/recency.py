"""Definition of the recency and inter-arrival features, independent of the array library.

For a candidate, an attribute and an event type, take the user's events of that type whose item
shares the candidate's value of the attribute (value 0 is "missing" and matches nothing). With
a_1, ..., a_n the ages of those events in seconds at the time of the request:

    last_age  = min(a)                    NO_EVENT_AGE if n = 0
    span      = max(a) - min(a)           0 if n < 2
    gap_count = n - 1                     0 if n < 2

The mean inter-arrival time of a user is span / gap_count; that of the population is the sum of
spans over the sum of gap counts. Models embed two buckets, both logarithmic:

    age bucket   = floor(AGE_BUCKETS_PER_E_FOLD * ln(max(1, age))), at most AGE_BUCKETS - 1
    phase bucket = floor((r + MAX_LOG_PHASE) * PHASE_BUCKETS / (2 * MAX_LOG_PHASE)),
                   r = ln(last_age / max(1, gap)) clipped to [-MAX_LOG_PHASE, MAX_LOG_PHASE)

AGE_BUCKETS stands for "no event", PHASE_BUCKETS for "no event or no gap". The functions below are
the definition, for one candidate. Batched implementations are ranking.inputs.recency_features
(numpy, for serving) and training.data.matching (torch); tests compare all three.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

NO_EVENT_AGE = 1 << 40  # seconds
AGE_BUCKETS = 160  # the last one begins at 93 days
AGE_BUCKETS_PER_E_FOLD = 10  # a bucket is a ratio of 10 %
PHASE_BUCKETS = 120  # a bucket is a ratio of 5 %
MAX_LOG_PHASE = 3.0

Values = TypeVar("Values")


@dataclass(frozen=True)
class RecencyFeatures(Generic[Values]):
    """Recency of matching events, in arrays of one shape; the last dimension is the event type."""

    last_age: Values
    span: Values
    gap_count: Values


def recency_of(ages: Sequence[int]) -> RecencyFeatures[int]:
    """Recency of the matching events of one type, from their ages in seconds."""
    if not ages:
        return RecencyFeatures(NO_EVENT_AGE, 0, 0)
    return RecencyFeatures(min(ages), max(ages) - min(ages), len(ages) - 1)


def age_bucket_of(age: float) -> int:
    """Bucket of an age in seconds."""
    return min(int(AGE_BUCKETS_PER_E_FOLD * math.log(max(1.0, age))), AGE_BUCKETS - 1)


def phase_bucket_of(last_age: float, gap: float) -> int:
    """Bucket of the age of the last event relative to a mean gap, both in seconds."""
    if last_age >= NO_EVENT_AGE or gap <= 0:
        return PHASE_BUCKETS
    ratio = math.log(last_age / max(1.0, gap))
    bucket = (ratio + MAX_LOG_PHASE) * PHASE_BUCKETS / (2 * MAX_LOG_PHASE)
    return min(max(int(bucket), 0), PHASE_BUCKETS - 1)
