"""Times as Spark columns: raw times in µs since the epoch, durations, and local dates.

Bounds of days are in etl/event_time.py.
"""

from pyspark.sql import Column
from pyspark.sql import functions as F

from etl.spec.file_source import TimeUnit
from etl.spec.model import DataSpec
from etl.spec.units import DAY, MICROS

MAX_EPOCH_US = 100_000_000_000_000_000  # the year 5138: larger numbers are not timestamps
NANOS_PER_MICRO = 1_000
HAS_ZONE = r"(Z|[+-]\d\d(:?\d\d)?)$"
HAS_DATE = r"^\s*\d{4}-\d\d?-\d\d?"
IS_DATE = r"^\d{4}-\d\d-\d\d$"


def parse_time(spec: DataSpec, unit: TimeUnit, text: Column) -> Column:
    """The µs since the epoch of a text in a time unit; null if it is not a time."""
    return _if_in_range(_parse_iso(spec, text) if unit == "iso" else _parse_micros(unit, text))


def duration_micros(unit: TimeUnit, text: Column) -> Column:
    """The µs of a number in a time unit (ms where times are ISO texts); null if not a number."""
    return _if_in_range(_parse_micros(unit, text))


def _if_in_range(micros: Column) -> Column:
    """A time or duration; null unless it is within MAX_EPOCH_US of zero.

    Logs may have the least or largest integer for a missing time. A sum with these would overflow,
    which stops Spark.
    """
    return F.when((micros > -MAX_EPOCH_US) & (micros < MAX_EPOCH_US), micros)


def _parse_micros(unit: TimeUnit, text: Column) -> Column:
    number = text.try_cast("bigint")
    if unit == "ns":
        return F.call_function("div", number, F.lit(NANOS_PER_MICRO))
    factor = MICROS["ms" if unit == "iso" else unit]
    fraction = (text.try_cast("decimal(28, 6)") * F.lit(factor)).try_cast("bigint")
    return F.coalesce(F.try_multiply(number, F.lit(factor)), fraction)


def _parse_iso(spec: DataSpec, text: Column) -> Column:
    """An ISO 8601 text; without a zone it is in the spec's time zone, not the session's.

    Null without a date, for which Spark would take the current one.
    """
    has_zone = text.rlike(HAS_ZONE) & ~text.rlike(IS_DATE)
    in_utc = F.concat(text, F.when(text.rlike(IS_DATE), F.lit("T00:00:00Z")).otherwise(F.lit("Z")))
    local = F.try_to_timestamp(in_utc)
    if spec.time_zone != "UTC":
        local = F.to_utc_timestamp(local, spec.time_zone)
    instant = F.when(has_zone, F.try_to_timestamp(text)).otherwise(local)
    return F.when(text.rlike(HAS_DATE), F.unix_micros(instant))


def to_local_seconds(spec: DataSpec, seconds: Column) -> Column:
    """Seconds between 1970-01-01 00:00 and the local wall-clock time of an epoch second."""
    if spec.time_zone == "UTC":
        return seconds
    return F.unix_seconds(F.from_utc_timestamp(F.timestamp_seconds(seconds), spec.time_zone))


def local_date(spec: DataSpec, seconds: Column) -> Column:
    """The date of an epoch second in the spec's time zone."""
    return F.date_from_unix_date(F.floor(to_local_seconds(spec, seconds) / DAY).cast("int"))
