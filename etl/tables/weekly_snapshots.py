"""Weekly snapshots of state that grows by the day, so that a day does not read all days before it.

A table of snapshots has the state at the end of every seventh day, in the partition of that day.
Which days these are depends on the calendar alone: any split of a range of days into runs gives the
same snapshots. State at the end of another day is the latest snapshot before it and the days since.
"""

from collections.abc import Callable, Sequence
from datetime import date, timedelta

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from etl.spec.units import date_range
from etl.tables import spark_io
from etl.tables.lake import Lake, create_table
from etl.tables.schemas import NO_DAY, STATIC_DAY
from etl.tables.table_schema import TableSchema

DAYS_PER_SNAPSHOT = 7


def snapshot_days(first: date, last: date) -> list[date]:
    """The days of a range at whose end there is a snapshot."""
    days = date_range(first, last)
    return [day for day in days if day.toordinal() % DAYS_PER_SNAPSHOT == 0]


def rows_from_snapshot(
    lake: Lake, table: TableSchema, snapshots: TableSchema, day: date, version: int | None = None
) -> DataFrame:
    """The rows of a table that matter on a day or later: those of the latest snapshot before it.

    With them are the rows that have landed since, and static ones. All rows without a snapshot.
    """
    rows = spark_io.read_table(lake, table, version)
    snapshot_day = lake.latest_day(snapshots.name, before=day)
    if snapshot_day is None:
        return rows
    is_recent = (F.col("day") > F.lit(snapshot_day)) | (F.col("day") == F.lit(STATIC_DAY))
    snapshot = spark_io.read_table(lake, snapshots).filter(F.col("day") == F.lit(snapshot_day))
    snapshot = snapshot.drop("day").withColumnRenamed("landing_day", "day")
    return rows.filter(is_recent).unionByName(snapshot.select(rows.columns))


def is_valid_after(keys: Sequence[str], time_us: Column) -> Column:
    """Whether no other version of the same keys supersedes a row up to a time (µs)."""
    order = Window.partitionBy(*keys).orderBy("valid_from", "day")
    superseded_from = F.lead("valid_from").over(order)
    return superseded_from.isNull() | (superseded_from > time_us)


def build_snapshots(
    lake: Lake,
    schema: TableSchema,
    source: str,
    first_day: date,
    state_at_end_of: Callable[[date], DataFrame],
) -> None:
    """Write the snapshots of a day and of later ones, up to the last day of the table `source`.

    If the week before the day has no snapshot, because no rows of the source were that late until
    now, it gets one, too: some sources have no rows on some days of the week.

    `state_at_end_of` returns the rows of the snapshot of a day, without the column `day`. It may
    read earlier snapshots, which are written first.
    """
    days = [day for day in lake.rows_by_day(source) if day != NO_DAY]
    if not days:
        return
    latest, version = lake.latest_day(schema.name, before=first_day), lake.version(source)
    first = max(first_day - timedelta(days=DAYS_PER_SNAPSHOT - 1), min(days))
    if latest is not None:
        first = max(first, latest + timedelta(days=1))
    for day in snapshot_days(first, max(days)):
        rows = state_at_end_of(day).withColumn("day", F.lit(day))
        spark_io.replace_partitions(lake, schema, rows, f"day = '{day}'", {source: version})


def remove_snapshots_from(lake: Lake, schema: TableSchema, day: date) -> None:
    """Remove the snapshots of a day and of later ones, before rows they were made of change."""
    create_table(lake, schema)
    latest = lake.latest_day(schema.name)
    if latest is not None and latest >= day:
        stale = spark_io.read_table(lake, schema).limit(0)
        spark_io.replace_partitions(lake, schema, stale, f"day >= '{day}'", {})
