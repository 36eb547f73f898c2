"""The `examples` table: each impression with the features that were known before it.

A row has a pointer into its user's history, point-in-time counters, the user's attributes as of
the impression, and the encoded context.
"""

from datetime import date, timedelta

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from etl.attribute_versions import versions_from
from etl.labels import assign_request_ids
from etl.spec.attributes import LocalTimeAttribute
from etl.spec.model import DataSpec
from etl.spec.units import MICROS
from etl.tables import schemas, spark_io
from etl.tables.lake import Lake
from features.counters import HOT_EVENTS, count_events, find_hot_leads
from features.coverage import missing_attribute_counts
from features.encoding.spark import encode_attribute, encode_local_time
from features.history.event_counts import event_counts_before
from features.items import first_item_versions, item_index_or_hash_bucket
from features.ragged import as_of_expression
from features.schema import counter_horizon_days, counter_input_days


def asof_join(left: DataFrame, right: DataFrame, key_column: str, ts_column: str) -> DataFrame:
    """For each row of `left` the latest row of `right` with its key and an earlier time.

    `left` has the key, the time and impression_id; `right` has the key, the time and one value
    column. Returns `impression_id` and the value, null where there is no earlier row.

    A union and one window sort each key's rows once. A range join would first pair each row of
    `left` with all earlier rows of its key.
    """
    (value,) = (name for name in right.columns if name not in {key_column, ts_column})
    rows = left.unionByName(right, allowMissingColumns=True)
    up_to_row = (
        Window.partitionBy(key_column)
        .orderBy(ts_column, F.asc_nulls_last("impression_id"))  # equal times: `left` comes first
        .rowsBetween(Window.unboundedPreceding, Window.currentRow)
    )
    joined = rows.withColumn(value, F.last(value, ignorenulls=True).over(up_to_row))
    return joined.filter("impression_id IS NOT NULL").select("impression_id", value)


def build_examples(lake: Lake, days: tuple[date, date]) -> dict[str, int]:
    """Replace the given days of `examples`, by the landing day of the impression."""
    spec = lake.spec
    names = ("events", "items", "item_versions", "history", "attributes_user")
    versions = {name: lake.version(name) for name in names}
    items = spark_io.read_table(lake, schemas.items(spec), versions["items"]).drop("day")
    items = items.join(first_item_versions(lake), "item_index", "left")
    events = spark_io.read_table(lake, schemas.events(spec), versions["events"])
    impressions = impressions_of_days(spec, events, items, days)
    impressions = impressions.persist(StorageLevel.MEMORY_AND_DISK)
    counted_since = days[0] - timedelta(days=counter_horizon_days(spec))
    recent = countable_events(spec, events, items, days)
    recent = recent.select(
        "visible_ts", "type", "dwell_ms", "value", *_key_columns(spec, "visible_ts")
    )
    queries = impressions.select("impression_id", "as_of_ts", *_key_columns(spec, "as_of_ts"))
    has_many = lake.count_rows("events", (first_input_day(spec, days), days[1])) >= HOT_EVENTS
    hot_leads = find_hot_leads(spec, recent) if has_many else None
    counted = count_events(spec, recent, queries, hot_leads)
    earlier = event_counts_before(lake, versions["history"], counted_since)
    rows = impressions.join(counted, "impression_id").join(earlier, "user_id", "left")
    user_versions = versions_from(lake, "user", counted_since, versions["attributes_user"])
    rows = _join_user_attributes(spec, rows, user_versions)
    rows = rows.withColumns(
        {
            **_encoded_columns(spec),
            "history_length": F.coalesce("events", F.lit(0)) + F.col("seen"),
            "history_version": F.lit(versions["history"]),
            "item_index": item_index_or_hash_bucket(),
            "item_known_since": F.when(_is_item_known("as_of_ts"), F.col("item_known_since")),
        }
    )
    where, contract = spark_io.day_range_predicate(*days), schemas.examples(spec)
    try:
        spark_io.replace_partitions(lake, contract, rows, where, versions)
    finally:
        impressions.unpersist()
    return {"examples": lake.count_rows(contract.name, days)} | missing_attribute_counts(lake, days)


def impressions_of_days(
    spec: DataSpec, events: DataFrame, items: DataFrame, days: tuple[date, date]
) -> DataFrame:
    """The impressions that landed on some days, with their request, as-of time and item."""
    impressions = events.filter(F.col("type") == spec.event_codes[spec.impression_type])
    impressions = impressions.filter(spark_io.day_range_predicate(*days))
    impressions = impressions.join(items, "item_id", "left")
    return add_as_of_ts(spec, assign_request_ids(spec, impressions))


def first_input_day(spec: DataSpec, days: tuple[date, date]) -> date:
    """The first landing day of events that impressions of some days can count."""
    return days[0] - timedelta(days=counter_input_days(spec))


def countable_events(
    spec: DataSpec, events: DataFrame, items: DataFrame, days: tuple[date, date]
) -> DataFrame:
    """The events that impressions of some days can count, with their items."""
    counted_since = days[0] - timedelta(days=counter_horizon_days(spec))
    first_day = first_input_day(spec, days)
    recent = events.filter(spark_io.day_range_predicate(first_day, days[1]))
    recent = recent.filter(F.col("visible_ts") >= spec.day_start(counted_since))
    return recent.join(items, "item_id", "left")


def add_as_of_ts(spec: DataSpec, impressions: DataFrame) -> DataFrame:
    """Impressions with `as_of_ts`: the earliest as-of second of any impression of their request."""
    request = Window.partitionBy("day", "user_id", "request_id")
    return impressions.withColumn("as_of_ts", F.min(F.expr(as_of_expression(spec))).over(request))


def _is_item_known(ts_column: str) -> Column:
    return F.col("item_known_since") < F.col(ts_column)


def _key_columns(spec: DataSpec, ts_column: str) -> list[Column]:
    """The parts of counter keys, as integers; null where unknown at the second in `ts_column`."""
    keys = {
        "key_user": F.xxhash64("user_id"),
        "key_item": F.col("item_index").cast("bigint"),
        "key_surface": F.col("surface").cast("bigint"),
    }
    for name in schemas.item_counter_key_columns(spec):
        keys[name] = F.when(_is_item_known(ts_column), F.col(name))
    return [key.alias(name) for name, key in keys.items()]


def _join_user_attributes(spec: DataSpec, rows: DataFrame, versions: DataFrame) -> DataFrame:
    """Rows with their user's latest attributes that were valid strictly before their as-of time."""
    names = [f"attr_{name}" for name in spec.attributes.user]
    since = F.floor(F.col("valid_from") / MICROS["s"]).alias("user_known_since")
    user_versions = versions.select("user_id", "valid_from", F.struct(since, *names).alias("user"))
    as_of = (F.col("as_of_ts") * MICROS["s"]).alias("valid_from")
    queries = rows.select("user_id", as_of, "impression_id")
    joined = asof_join(queries, user_versions, "user_id", "valid_from")
    rows = rows.join(joined, "impression_id")
    return rows.withColumn("user_known_since", F.col("user.user_known_since"))


def _encoded_columns(spec: DataSpec) -> dict[str, Column]:
    """Encoded user and context attributes by column."""
    encoded = {
        f"user_{name}": encode_attribute(attribute, F.col(f"user.attr_{name}"))
        for name, attribute in spec.attributes.user.items()
    }
    for name, attribute in spec.attributes.context.items():
        column = f"ctx_{name}"
        if isinstance(attribute, LocalTimeAttribute):
            encoded[column] = encode_local_time(spec, attribute, F.col("as_of_ts"))
        else:
            encoded[column] = encode_attribute(attribute, F.col(column))
    return encoded
