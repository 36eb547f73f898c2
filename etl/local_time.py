"""Epoch seconds by the clocks on the walls of the spec's time zone, in Spark."""

from pyspark.sql import Column
from pyspark.sql import functions as F

from etl.spec.model import DataSpec
from etl.spec.units import DAY


def local_seconds(spec: DataSpec, seconds: Column) -> Column:
    """Seconds since 1970 began on those clocks."""
    if spec.time_zone == "UTC":
        return seconds
    return F.unix_seconds(F.from_utc_timestamp(F.timestamp_seconds(seconds), spec.time_zone))


def day_of(spec: DataSpec, seconds: Column) -> Column:
    """The spec's day of an epoch second."""
    return F.date_from_unix_date(F.floor(local_seconds(spec, seconds) / DAY).cast("int"))
