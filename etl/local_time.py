"""Epoch seconds in the spec's time zone, as Spark columns; see etl/event_time.py for day bounds."""

from pyspark.sql import Column
from pyspark.sql import functions as F

from etl.spec.model import DataSpec
from etl.spec.units import DAY


def to_local_seconds(spec: DataSpec, seconds: Column) -> Column:
    """Seconds between 1970-01-01 00:00 and the local wall-clock time of an epoch second."""
    if spec.time_zone == "UTC":
        return seconds
    return F.unix_seconds(F.from_utc_timestamp(F.timestamp_seconds(seconds), spec.time_zone))


def local_date(spec: DataSpec, seconds: Column) -> Column:
    """The date of an epoch second in the spec's time zone."""
    return F.date_from_unix_date(F.floor(to_local_seconds(spec, seconds) / DAY).cast("int"))
