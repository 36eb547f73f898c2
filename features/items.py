"""The `items` table (item_id to item_index) and `item_versions` (attributes, when known)."""

from datetime import date, timedelta

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from etl.attribute_versions import filter_readable_after, versions_from
from etl.event_time import day_start_sql
from etl.spec.model import DataSpec
from etl.spec.sources import AttributeSource
from etl.spec.units import MICROS, DayRange
from etl.tables import schemas, spark_io
from etl.tables.declared_columns import item_counter_key_columns
from etl.tables.lake import Lake
from etl.tables.schemas import STATIC_DAY
from features.encoding.spark import encode_attribute

NUMBERING_BLOCKS = 64  # of the items of a day that are about equally frequent


def index_items(lake: Lake, days: DayRange) -> dict[str, int]:
    """Assign an index to each item first seen in the given days; every other item keeps its own.

    Indexes begin after the reserved ones (`schemas.RESERVED_ITEM_INDICES`). Items are indexed day
    by day, so that a range gives the same indexes as its days one by one, and popular items of a
    day first, so that frequent items have small numbers. Days may be run again at any time: an
    assigned index is never reused, not even if a corrected log no longer contains its item.
    """
    versions = {"events": lake.version("events")}
    schema = schemas.items(lake.spec)
    items = _items_seen(lake, versions["events"], days)
    highest_index = schemas.RESERVED_ITEM_INDICES - 1
    if lake.exists(schema.name):
        versions["items"] = lake.version(schema.name)
        stored = spark_io.read_table(lake, schema, versions["items"])
        indexed = stored.select("item_id", "item_index", F.col("day").alias("indexed_day"))
        items = items.join(indexed, "item_id", "full")
        is_rewritten = F.col("indexed_day").between(F.lit(days[0]), F.lit(days[1]))
        items = items.filter(F.col("indexed_day").isNull() | is_rewritten)
        items = items.withColumn("day", F.coalesce("day", "indexed_day"))
        row = stored.agg(F.max("item_index")).first()
        highest_index = (row and row[0]) or highest_index
    else:
        items = items.withColumn("item_index", F.lit(None).cast("int"))
    with spark_io.cached(items) as items:
        numbered = number_items(items.filter("item_index IS NULL"), highest_index + 1)
        rows = items.filter("item_index IS NOT NULL").select(numbered.columns).unionByName(numbered)
        where = spark_io.day_range_predicate(*days)
        spark_io.replace_partitions(lake, schema, rows, where, versions)
    return {"items": lake.count_rows(schema.name)} | build_item_versions(lake, days)


def number_items(items: DataFrame, first_index: int) -> DataFrame:
    """Items (`item_id`, `day`, `n` events) with consecutive indexes from `first_index` on.

    They are ordered by day, and within a day by the order of magnitude of `n` (powers of two), the
    largest first; those alike by a hash. Each of these blocks is numbered by a task of its own, so
    that no task sees all items, and the result does not depend on how Spark distributes them.
    """
    hash_block = F.pmod(F.xxhash64("item_id"), F.lit(NUMBERING_BLOCKS))
    keys = {"magnitude": -F.floor(F.log2("n")), "hash_block": hash_block}
    blocks = ("day", *keys)
    items = items.withColumns(keys)
    before = Window.orderBy(*blocks).rowsBetween(Window.unboundedPreceding, -1)
    items_before = F.coalesce(F.sum("count").over(before), F.lit(0)).alias("items_before")
    offsets = items.groupBy(*blocks).count().select(*blocks, items_before)
    position = F.row_number().over(Window.partitionBy(*blocks).orderBy("item_id"))
    index = (position - 1 + F.col("items_before") + first_index).cast("int")
    numbered = items.join(F.broadcast(offsets), [*blocks]).withColumn("item_index", index)
    return numbered.select("item_id", "day", "item_index")


def _items_seen(lake: Lake, version: int, days: DayRange) -> DataFrame:
    """Items with events in the given days: their first `day` there, and `n` events on it."""
    events = spark_io.read_table(lake, schemas.events(lake.spec), version)
    daily = events.filter(spark_io.day_range_predicate(*days)).groupBy("item_id", "day").count()
    return daily.groupBy("item_id").agg(
        F.min("day").alias("day"), F.min_by("count", "day").alias("n")
    )


def item_index_or_hash_bucket() -> Column:
    """`item_index`; where it is null, one of the reserved indexes by the hash of `item_id`."""
    hash_bucket = F.pmod(F.xxhash64("item_id"), F.lit(schemas.RESERVED_ITEM_INDICES - 1)) + 1
    return F.coalesce("item_index", hash_bucket.cast("int"))


def build_item_versions(lake: Lake, days: DayRange) -> dict[str, int]:
    """Replace the given days of `item_versions`: attributes that landed on them, of indexed items.

    Of the attributes that landed before their item was first seen, those that a request can read
    and the first version are stored on the day when it was.
    """
    spec, schema = lake.spec, schemas.item_versions(lake.spec)
    versions = {name: lake.version(name) for name in ("items", "attributes_item")}
    items = spark_io.read_table(lake, schemas.items(spec), versions["items"])
    items = items.select("item_id", "item_index", F.col("day").alias("first_seen_day"))
    # A request at midnight reads what was valid on the day before.
    earliest_request = days[0] - timedelta(days=spec.allowed_lateness_days + 1)
    rows = versions_from(lake, "item", earliest_request, versions["attributes_item"])
    rows = _readable_once_seen(spec, rows.join(items, "item_id"), days)
    rows = _with_day_of_use(lake, rows, days)
    columns = {
        f"item_{name}": encode_attribute(attribute, F.col(f"attr_{name}"))
        for name, attribute in spec.attributes.item.items()
    }
    for name in item_counter_key_columns(spec):
        value = F.col(f"attr_{name.removeprefix('key_')}")
        columns[name] = F.when(value.isNotNull(), F.xxhash64(value))
    where = spark_io.day_range_predicate(*days)
    spark_io.replace_partitions(
        lake, schema, rows.filter(where).withColumns(columns), where, versions
    )
    build_first_item_versions(lake, days[0])
    return {"item versions": lake.count_rows(schema.name)}


def _readable_once_seen(spec: DataSpec, rows: DataFrame, days: DayRange) -> DataFrame:
    """The versions of items that were known before, and those of new ones that can be read.

    A new item is one first seen in `days`. No impression of it is earlier than `allowed_lateness`
    before that day, so that what others superseded by then is never read; the first version is
    kept, because counters use its attributes. Which versions these are does not depend on the
    weekly snapshots in which earlier ones were found.
    """
    is_new = F.col("first_seen_day").between(*map(F.lit, days))
    of_new = _with_first_readable_us(spec, rows.filter(is_new))
    of_new = filter_readable_after(of_new, "item", F.col("first_readable_us") - 1)
    return rows.filter(~is_new).unionByName(of_new.select(rows.columns))


def _with_first_readable_us(spec: DataSpec, rows: DataFrame) -> DataFrame:
    """Versions with the time (µs) before which no impression of their item occurred."""
    # One day more: the lateness is in seconds, and a day on which clocks change has fewer.
    first_day = F.date_sub("first_seen_day", spec.allowed_lateness_days + 1)
    start_us = F.expr(day_start_sql(spec, "first_readable_day")) * MICROS["s"]
    rows = rows.withColumn("first_readable_day", first_day)
    return rows.withColumn("first_readable_us", start_us).drop("first_readable_day")


def _with_day_of_use(lake: Lake, rows: DataFrame, days: DayRange) -> DataFrame:
    """Versions with the first `day` on which they are read: that of the item, or a later one.

    Static rows have no day. Those that were added to their source after their item had been seen
    are read from the first of the given days on.
    """
    landing_day, schema = F.col("day"), schemas.item_versions(lake.spec)
    if _has_static_items(lake.spec) and lake.exists(schema.name):
        stored = spark_io.read_table(lake, schema).filter(F.col("day") < F.lit(days[0]))
        times = F.collect_set("valid_from").alias("stored")
        rows = rows.join(stored.groupBy("item_index").agg(times), "item_index", "left")
        rows = _with_first_readable_us(lake.spec, rows)
        is_added = (landing_day == F.lit(STATIC_DAY)) & ~_was_stored_or_left_out()
        landing_day = F.when(is_added, F.lit(days[0])).otherwise(landing_day)
    rows = rows.withColumn("day", F.greatest(landing_day, "first_seen_day"))
    return rows.drop("stored", "first_readable_us")


def _has_static_items(spec: DataSpec) -> bool:
    """Whether the attributes of items are in a static source."""
    attributes = (s for s in spec.sources.values() if isinstance(s, AttributeSource))
    return any(source.static and source.entity == "item" for source in attributes)


def _was_stored_or_left_out() -> Column:
    """Whether a version has one of the `stored` times, or was left out by `_readable_once_seen`.

    One that is earlier than all stored versions was not left out: it becomes the first.
    """
    valid_from, stored = F.col("valid_from"), F.col("stored")
    is_superseded = (valid_from > F.array_min(stored)) & F.exists(
        stored, lambda other: (other > valid_from) & (other < F.col("first_readable_us"))
    )
    return F.coalesce(F.array_contains(stored, valid_from) | is_superseded, F.lit(False))


def build_first_item_versions(lake: Lake, first_day: date) -> None:
    """Replace a day of `first_item_versions` and all later ones; all days if there are none."""
    schema, spec = schemas.first_item_versions(lake.spec), lake.spec
    versions = {"item_versions": lake.version("item_versions")}
    stored = spark_io.read_table(lake, schemas.item_versions(spec), versions["item_versions"])
    is_earlier, where = F.lit(True), "true"
    if lake.rows_by_day(schema.name):
        where = f"day >= '{first_day}'"
        known = spark_io.read_table(lake, schema).filter(F.col("day") < F.lit(first_day))
        known = known.groupBy("item_index").agg(F.min("valid_from").alias("known_from"))
        stored = stored.filter(where).join(known, "item_index", "left")
        is_earlier = F.coalesce(F.col("valid_from") < F.col("known_from"), F.lit(True))
    keys = item_counter_key_columns(spec)
    values = F.struct("valid_from", *keys, "day")
    first = F.min_by(values, F.struct("valid_from", "day")).alias("first")
    rows = (
        stored.filter(is_earlier).groupBy("item_index").agg(first).select("item_index", "first.*")
    )
    spark_io.replace_partitions(lake, schema, rows, where, versions)


def first_item_versions(lake: Lake) -> DataFrame:
    """The counter keys in each item's first attributes, and the second since when they are known.

    Columns `item_index`, `item_known_since` and the keys. Counters use an item's first attributes
    only, so that later changes do not move counts between keys.
    """
    keys = item_counter_key_columns(lake.spec)
    stored = spark_io.read_table(lake, schemas.first_item_versions(lake.spec))
    values = F.struct("valid_from", *keys)
    first = F.min_by(values, F.struct("valid_from", "day")).alias("first")
    since = F.floor(F.col("first.valid_from") / MICROS["s"]).alias("item_known_since")
    rows = stored.groupBy("item_index").agg(first)
    return rows.select("item_index", since, *[f"first.{name}" for name in keys])
