"""Noise of logs: ingest delays, late and duplicate records, and malformed lines."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.simulator.arrays import MISSING, Events, Ints
from etl.simulator.config import DAY_MS, HOUR_MS, SECOND_MS, EventType

MIN_INGEST_DELAY_MS, MEAN_INGEST_DELAY_MS = 200, 4 * SECOND_MS
CONVERSION_REPORTING_DELAY_MS = (1 * HOUR_MS, 6 * HOUR_MS)  # after the conversion
LATE_ARRIVAL_DELAY_MS = (2 * HOUR_MS, 2 * DAY_MS)  # after the event
DUPLICATE_DELAY_MS = (1, 12 * HOUR_MS)  # after the first copy


def assign_ingest_times(events: Events, rng: np.random.Generator) -> Events:
    """The events with their usual ingest times."""
    n = len(events)
    ingest_delay = MIN_INGEST_DELAY_MS + MEAN_INGEST_DELAY_MS * rng.standard_exponential(n)
    reporting_delay = rng.uniform(*CONVERSION_REPORTING_DELAY_MS, size=n)
    delay = ingest_delay + np.where(events.type == EventType.CONVERSION, reporting_delay, 0)
    return replace(events, ingest_time=events.event_time + delay.astype(np.int64))


def delay_events(events: Events, rate: float, end_ms: int, rng: np.random.Generator) -> Events:
    """Delay a share `rate` of the events by hours to days, unless the run would have ended."""
    n = len(events)
    delayed_ms = events.event_time + _log_uniform(LATE_ARRIVAL_DELAY_MS, n, rng)
    late_ms = np.maximum(events.ingest_time, delayed_ms)
    is_late = (rng.random(n) < rate) & (late_ms < end_ms)
    return replace(events, ingest_time=np.where(is_late, late_ms, events.ingest_time))


def duplicate_events(events: Events, rate: float, rng: np.random.Generator) -> Events:
    """The events, and later copies of a share `rate` of them."""
    copies = events.take(rng.random(len(events)) < rate)
    ingest_ms = copies.ingest_time + _log_uniform(DUPLICATE_DELAY_MS, len(copies), rng)
    return Events.concat([events, replace(copies, ingest_time=ingest_ms)])


def _log_uniform(bounds: tuple[int, int], count: int, rng: np.random.Generator) -> Ints:
    low, high = bounds
    return np.exp(rng.uniform(np.log(low), np.log(high), size=count)).astype(np.int64)


class Corruption(NamedTuple):
    """A regular expression replaced in a line; applies to records in which `field` is set."""

    field: str
    pattern: str
    replacement: str


CORRUPTIONS = (
    Corruption("event_time", r".{12}\n$", "\n"),  # cut off
    Corruption("event_time", r"^.*\n$", "{}\n"),
    Corruption("event_time", r'"event_time":\d+', '"event_time":"noon"'),
    Corruption("event_time", r'"event_time":\d+', '"event_time":86400000'),  # in 1970
    Corruption("event_time", r'"event_time":\d+', '"event_time":4294967295000'),  # in 2106
    Corruption("event_time", r'"event_time":\d+', '"event_time":9999999999999999999'),
    Corruption("event_time", r'"event_time":\d+', '"event_time":99999999999999999'),
    Corruption("position", r'"position":\d+', '"position":"top"'),
    Corruption("dwell_ms", r'"dwell_ms":', '"dwell_ms":-1'),  # negative
    Corruption("user", r'"user_id":"\w+",', ""),
    Corruption("item", r'"item_id":"\w+",', ""),
    Corruption("surface", r'"surface":"\w+"', '"surface":"watch"'),
)


def corrupt_lines(
    events: Events, lines: pa.StringArray, rate: float, rng: np.random.Generator
) -> tuple[Ints, pa.StringArray]:
    """Corrupted copies of some lines, `rate` per line and equally many of each corruption.

    Returns:
        The (m,) rows that were copied, and the m malformed lines.
    """
    expected = rate * len(events) / len(CORRUPTIONS)
    rows, malformed = [], []
    for corruption in CORRUPTIONS:
        eligible = np.flatnonzero(getattr(events, corruption.field) != MISSING)
        chosen = rng.choice(eligible, min(rng.poisson(expected), eligible.size))
        rows.append(chosen)
        malformed.append(
            pc.replace_substring_regex(
                lines.take(chosen), pattern=corruption.pattern, replacement=corruption.replacement
            )
        )
    return np.concatenate(rows), pa.concat_arrays(malformed)
