"""How records reach the logs: most in seconds, some late, some twice."""

from dataclasses import replace

import numpy as np

from etl.sources.simulator.columns import Events, Ints
from etl.sources.simulator.config import DAY_MS, HOUR_MS, SECOND_MS
from etl.sources.simulator.vocabulary import EventType

LEAST_TRANSIT_MS, MEAN_TRANSIT_MS = 200, 4 * SECOND_MS
MEASURED_MS = (1 * HOUR_MS, 6 * HOUR_MS)  # a conversion is measured this long after it happened
LATE_MS = (2 * HOUR_MS, 2 * DAY_MS)  # after the event
REPEATED_MS = (1, 12 * HOUR_MS)  # after the first copy


def arrive(events: Events, rng: np.random.Generator) -> Events:
    """The events with the time at which each lands when nothing goes wrong."""
    n = len(events)
    transit = LEAST_TRANSIT_MS + MEAN_TRANSIT_MS * rng.standard_exponential(n)
    measured = rng.uniform(*MEASURED_MS, size=n)
    delay = transit + np.where(events.type == EventType.CONVERSION, measured, 0)
    return replace(events, ingest_time=events.event_time + delay.astype(np.int64))


def delay_some(events: Events, rate: float, end_ms: int, rng: np.random.Generator) -> Events:
    """A share `rate` of the events lands hours to days late, unless the run would be over."""
    n = len(events)
    late_ms = np.maximum(events.ingest_time, events.event_time + _log_uniform(LATE_MS, n, rng))
    is_late = (rng.random(n) < rate) & (late_ms < end_ms)
    return replace(events, ingest_time=np.where(is_late, late_ms, events.ingest_time))


def repeat_some(events: Events, rate: float, rng: np.random.Generator) -> Events:
    """The events, and a copy of a share `rate` of them that lands later."""
    again = events.take(rng.random(len(events)) < rate)
    ingest_ms = again.ingest_time + _log_uniform(REPEATED_MS, len(again), rng)
    return Events.concat([events, replace(again, ingest_time=ingest_ms)])


def _log_uniform(bounds: tuple[int, int], count: int, rng: np.random.Generator) -> Ints:
    least, most = bounds
    return np.exp(rng.uniform(np.log(least), np.log(most), size=count)).astype(np.int64)
