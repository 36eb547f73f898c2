"""Versions of users and items: which of them a day can read, and which differ from the previous.

A version lands on a day, and is valid from some time of it or later. Weekly snapshots hold the
versions that a later day can read, so that a day does not read those of all days before it.
"""

from datetime import date
from functools import partial

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from etl.event_time import day_end_sql
from etl.spec.sources import AttributeSource
from etl.spec.units import MICROS
from etl.tables import schemas
from etl.tables.lake import Lake
from etl.tables.schemas import STATIC_DAY
from etl.tables.weekly_snapshots import build_snapshots, is_valid_after, rows_from_snapshot


def versions_from(lake: Lake, entity: str, day: date, version: int | None = None) -> DataFrame:
    """The stored versions of users or items that can be valid at some time of a day or later.

    These are the latest snapshot before the day, the versions that have landed since, and static
    rows. They may contain versions that others have superseded before the day; the first version of
    an item is always among them.
    """
    schemas_of = schemas.attributes, schemas.attribute_snapshots
    table, snapshots = (schema(lake.spec, entity) for schema in schemas_of)
    return rows_from_snapshot(lake, table, snapshots, day, version)


def first_item_values(lake: Lake, attribute: str) -> DataFrame:
    """The first value of an attribute of each item, since when it is known.

    Returns:
        `item_id`, `item_attribute`, `item_known_since` in µs, and `item_landing_day`.
    """
    versions = versions_from(lake, "item", date.max)  # these have the first version of each item
    order = F.struct("valid_from", "day")
    return versions.groupBy("item_id").agg(
        F.min_by(f"attr_{attribute}", order).alias("item_attribute"),
        F.min("valid_from").alias("item_known_since"),
        F.min_by("day", order).alias("item_landing_day"),
    )


def with_item_key(lake: Lake, events: DataFrame, key: str) -> DataFrame:
    """Events with `item_key`, which is their `item`, or the first value of an attribute of it.

    `item_key_since` is the second since when it is known, `item_key_day` the day on which it
    landed. All are null for an item without versions.
    """
    if key == "item":
        return events.withColumns(
            {
                "item_key": F.col("item_id"),
                "item_key_since": F.lit(0).cast("bigint"),
                "item_key_day": F.lit(STATIC_DAY),
            }
        )
    values = first_item_values(lake, key).select(
        "item_id",
        F.col("item_attribute").alias("item_key"),
        F.ceil(F.col("item_known_since") / MICROS["s"]).alias("item_key_since"),
        F.col("item_landing_day").alias("item_key_day"),
    )
    return events.join(values, "item_id", "left")


def build_version_snapshots(lake: Lake, entity: str, first_day: date) -> None:
    """Write the snapshots of a day and of later ones, up to the last day with versions."""
    schema = schemas.attribute_snapshots(lake.spec, entity)
    source = schemas.attributes(lake.spec, entity).name
    build_snapshots(lake, schema, source, first_day, partial(snapshot_rows, lake, entity))


def snapshot_rows(lake: Lake, entity: str, day: date) -> DataFrame:
    """The rows of the snapshot of a day, without static rows and without `day`.

    The first version of an item is kept: counters use its attributes.
    """
    rows = versions_from(lake, entity, day)
    rows = rows.filter((F.col("day") <= F.lit(day)) & (F.col("day") != F.lit(STATIC_DAY)))
    day_end_us = F.lit(lake.spec.day_end(day) * MICROS["s"])
    return filter_readable_after(rows, entity, day_end_us).withColumnRenamed("day", "landing_day")


def filter_readable_after(rows: DataFrame, entity: str, time_us: Column) -> DataFrame:
    """The versions that no other has superseded up to a time (µs), and the first of each item."""
    key = f"{entity}_id"
    is_readable = is_valid_after((key,), time_us)
    if entity == "item":
        order = Window.partitionBy(key).orderBy("valid_from", "day")
        is_readable |= F.row_number().over(order) == 1
    return rows.withColumn("is_readable", is_readable).filter("is_readable").drop("is_readable")


def changed_versions(
    lake: Lake, source: AttributeSource, versions: DataFrame, first_day: date
) -> DataFrame:
    """The versions, landing on a day or later, that differ from their key's previous version.

    A version that repeats the previous one is kept if it becomes valid after its landing day,
    because versions that land later may become valid before it.
    """
    key, *values = [name for name in versions.columns if name not in ("day", "valid_from")]
    value = F.struct(*values).alias("v")
    stored = versions_from(lake, source.entity, first_day).filter(F.col("day") < F.lit(first_day))
    rows = versions.select("day", key, "valid_from", value, F.lit(True).alias("is_new"))
    earlier = stored.select("day", key, "valid_from", value, F.lit(False).alias("is_new"))
    rows = rows.unionByName(earlier)
    order = Window.partitionBy(key).orderBy("valid_from", "day")
    rows = rows.withColumn("previous", F.lag("v").over(order))
    settled_us = F.expr(f"({day_end_sql(lake.spec)} + {source.delay}) * {MICROS['s']}")
    repeats = F.col("v").eqNullSafe(F.col("previous")) & (F.col("valid_from") <= settled_us)
    changed = rows.filter(F.col("is_new") & ~repeats)
    return changed.select("day", key, "valid_from", "v.*")
