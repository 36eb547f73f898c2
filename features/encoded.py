"""Attributes as models read them, one value at a time: what features/encoding.py says in Spark."""

from datetime import UTC, datetime
from functools import lru_cache
from math import copysign, isfinite, log1p, nan
from zoneinfo import ZoneInfo

import numpy as np
import xxhash

from etl.spec.attributes import Categorical, Clock, Numeric

SPARK_SEED = 42
TOO_LARGE = 1e30


def signed_hash(text: str) -> int:
    """Spark's xxhash64 of a string: a signed number of 64 bits."""
    found = xxhash.xxh64_intdigest(text.encode(), seed=SPARK_SEED)
    return found - (1 << 64) if found >> 63 else found


def row_of(attribute: Categorical, raw: str | None) -> int:
    """The row of a categorical value in its table: 0 missing, 1 out of vocabulary."""
    if raw is None:
        return 0
    if attribute.vocabulary is not None:
        known = raw in attribute.vocabulary
        return attribute.vocabulary.index(raw) + 2 if known else 1
    return signed_hash(raw) % (attribute.size - 1) + 1


def number_of(attribute: Numeric, raw: float | None) -> float:
    """A number as it is transformed, in single precision; NaN where it is missing."""
    if raw is None or not isfinite(raw) or abs(raw) >= TOO_LARGE:
        return nan
    scaled = copysign(log1p(abs(raw)), raw) if attribute.transform == "log" else raw
    return float(np.float32(scaled))


def clock_of(part: Clock, second: int, time_zone: str) -> int:
    """The hour or the weekday of an epoch second, from 1, in local time."""
    local = datetime.fromtimestamp(second, UTC).astimezone(_zone(time_zone))
    return local.hour + 1 if part.part == "hour" else local.isoweekday()


@lru_cache
def _zone(name: str) -> ZoneInfo:
    return ZoneInfo(name)
