"""Labels of data providers: which of them the impressions of a day can have.

A label is valid from a time of its landing day or later, until the next one of its provider for the
same user. Weekly snapshots hold the labels that a later day can read, so that a day does not read
those of all days before it.
"""

from datetime import date
from functools import partial

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from etl.spec.units import MICROS
from etl.tables.audience_schemas import audience_label_snapshots, audience_labels
from etl.tables.lake import Lake
from etl.tables.weekly_snapshots import build_snapshots, is_valid_after, rows_from_snapshot


def labels_from(lake: Lake, day: date, version: int | None = None) -> DataFrame:
    """The stored labels that can be valid at some time of a day or later.

    These are the latest snapshot before the day and the labels that have landed since. They may
    contain labels that others have superseded before the day.
    """
    tables = audience_labels(lake.spec), audience_label_snapshots(lake.spec)
    return rows_from_snapshot(lake, *tables, day, version)


def build_label_snapshots(lake: Lake, first_day: date) -> None:
    """Write the snapshots of a day and of later ones, up to the last day with labels."""
    schema = audience_label_snapshots(lake.spec)
    build_snapshots(lake, schema, "audience_labels", first_day, partial(_snapshot_rows, lake))


def _snapshot_rows(lake: Lake, day: date) -> DataFrame:
    """The labels at the end of a day that no other has superseded until then, without `day`."""
    rows = labels_from(lake, day).filter(F.col("day") <= F.lit(day))
    day_end_us = F.lit(lake.spec.day_end(day) * MICROS["s"])
    is_readable = is_valid_after(("audience", "provider", "user_id"), day_end_us)
    rows = rows.withColumn("is_readable", is_readable).filter("is_readable").drop("is_readable")
    return rows.withColumnRenamed("day", "landing_day")
