"""The `user_event_counts` table: how many events of each user had become visible by a day."""

from datetime import date, timedelta

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from etl.tables import schemas, spark_io, user_schemas
from etl.tables.lake import Lake
from etl.tables.weekly_snapshots import build_snapshots
from features.history.compact import require_not_compacted
from features.history.compacted import compacted_until


def build_event_counts(lake: Lake, first_day: date) -> None:
    """Write the snapshots of a day and of later ones, up to the last day of `history`."""
    schema = user_schemas.user_event_counts(lake.spec)
    version = lake.version("history")

    def counts_at_end_of(day: date) -> DataFrame:
        return event_counts_before(lake, version, day + timedelta(days=1))

    build_snapshots(lake, schema, "history", first_day, counts_at_end_of)


def event_counts_before(lake: Lake, history_version: int, day: date) -> DataFrame:
    """Number of events of each user before a day: `user_id`, `events`.

    That is the latest snapshot and the days of `history` since. A snapshot within the days that
    are compacted is of no use, because these are stored as one.
    """
    require_not_compacted(lake, day)
    history = spark_io.read_table(lake, schemas.history(lake.spec), history_version)
    events = (F.col("events") + F.col("dropped")).alias("events")
    rows = history.filter(F.col("day") < F.lit(day))
    schema, until = user_schemas.user_event_counts(lake.spec), compacted_until(lake)
    snapshot_day = lake.latest_day(schema.name, before=day)
    if snapshot_day is None or (until is not None and snapshot_day < until):
        counts = rows.select("user_id", events)
    else:
        snapshot = spark_io.read_table(lake, schema).filter(F.col("day") == F.lit(snapshot_day))
        recent = rows.filter(F.col("day") > F.lit(snapshot_day)).select("user_id", events)
        counts = snapshot.select("user_id", "events").unionByName(recent)
    return counts.groupBy("user_id").agg(F.sum("events").cast("int").alias("events"))
