"""The `examples` table: each impression with the features that were known before it.

A row has a pointer into its user's history, point-in-time counters, the user's attributes as of
the impression, and the encoded context.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Self

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from etl.attribute_versions import versions_from
from etl.labels import assign_request_ids
from etl.spec.attributes import LocalTimeAttribute
from etl.spec.model import DataSpec
from etl.spec.units import MICROS, DayRange
from etl.tables import schemas, spark_io
from etl.tables.declared_columns import item_counter_key_columns, number_column
from etl.tables.lake import Lake
from features.counters.counting import count_events
from features.counters.key_prefixes import HOT_EVENTS, find_hot_prefixes
from features.coverage import missing_attribute_counts
from features.encoding.scalar import MISSING_CATEGORY
from features.encoding.spark import encode_attribute, encode_local_time
from features.history.event_counts import event_counts_before
from features.items import first_item_versions, item_index_or_hash_bucket
from features.ragged import as_of_expression
from features.schema import counter_horizon_days, counter_input_days


def asof_join(left: DataFrame, right: DataFrame, key_column: str, ts_column: str) -> DataFrame:
    """The rows of `left`, each with the latest row of `right` with its key and an earlier time.

    `right` has the key, the time and one value column, which is null where there is no earlier row;
    of rows of one time the largest value counts.

    A union and one window sort each key's rows once. A range join would first pair each row of
    `left` with all earlier rows of its key.
    """
    (value,) = (name for name in right.columns if name not in {key_column, ts_column})
    rows = left.withColumn("is_left", F.lit(True)).unionByName(right, allowMissingColumns=True)
    up_to_row = (
        Window.partitionBy(key_column)
        # Of equal times `left` comes first, then the values in their order.
        .orderBy(ts_column, F.asc_nulls_last("is_left"), value)
        .rowsBetween(Window.unboundedPreceding, Window.currentRow)
    )
    joined = rows.withColumn(value, F.last(value, ignorenulls=True).over(up_to_row))
    return joined.filter("is_left").drop("is_left")


@dataclass(frozen=True)
class ExampleInputs:
    """The tables of which examples of some days are built, at one version each.

    Attributes:
        events: All events.
        items: Items with their indexes, and with their counter keys as first known.
        user_versions: Versions of users that counted events and impressions can read.
        event_counts: `events` of each user before those that are counted.
    """

    events: DataFrame
    items: DataFrame
    user_versions: DataFrame
    event_counts: DataFrame

    @classmethod
    def read(cls, lake: Lake, versions: dict[str, int], counted_since: date) -> Self:
        """The inputs at some versions of their tables."""
        # A request at midnight reads what was valid on the day before.
        day_before = counted_since - timedelta(days=1)
        items = spark_io.read_table(lake, schemas.items(lake.spec), versions["items"]).drop("day")
        return cls(
            events=spark_io.read_table(lake, schemas.events(lake.spec), versions["events"]),
            items=items.join(first_item_versions(lake), "item_index", "left"),
            user_versions=versions_from(lake, "user", day_before, versions["attributes_user"]),
            event_counts=event_counts_before(lake, versions["history"], counted_since),
        )


def build_examples(lake: Lake, days: DayRange) -> dict[str, int]:
    """Replace the given days of `examples`, by the landing day of the impression."""
    spec = lake.spec
    names = ("events", "items", "item_versions", "history", "attributes_user")
    versions = {name: lake.version(name) for name in names}
    counted_since = days[0] - timedelta(days=counter_horizon_days(spec))
    inputs = ExampleInputs.read(lake, versions, counted_since)
    where, schema = spark_io.day_range_predicate(*days), schemas.examples(spec)
    with ExitStack() as stack:
        impressions = impressions_of_days(spec, inputs, days)
        impressions = stack.enter_context(spark_io.cached(impressions))
        events = _counted_events(spec, inputs, days)
        if spec.user_counter_keys:  # read several times, after a join
            events = stack.enter_context(spark_io.cached(events))
        keys = _key_columns(spec, "as_of_ts", F.col("as_of_ts"))
        # An id may have been logged again days later: such impressions are not one query.
        query_id = F.concat_ws(" ", F.col("day").cast("string"), "impression_id")
        queries = impressions.select(query_id.alias("impression_id"), "as_of_ts", *keys)
        has_many = lake.count_rows("events", (first_input_day(spec, days), days[1])) >= HOT_EVENTS
        hot_prefixes = find_hot_prefixes(spec, events) if has_many else None
        counted = count_events(spec, events, queries, hot_prefixes)
        counted = counted.withColumnRenamed("impression_id", "query_id")
        rows = impressions.withColumn("query_id", query_id).join(counted, "query_id")
        rows = rows.join(inputs.event_counts, "user_id", "left")
        rows = rows.withColumns(
            {
                **_encoded_columns(spec),
                "user_known_since": F.col("user.user_known_since"),
                "history_length": F.coalesce("events", F.lit(0)) + F.col("seen"),
                "history_version": F.lit(versions["history"]),
                "item_index": item_index_or_hash_bucket(),
                "item_known_since": F.when(_is_item_known("as_of_ts"), F.col("item_known_since")),
            }
        )
        spark_io.replace_partitions(lake, schema, rows, where, versions)
    return {"examples": lake.count_rows(schema.name, days)} | missing_attribute_counts(lake, days)


def _counted_events(spec: DataSpec, inputs: ExampleInputs, days: DayRange) -> DataFrame:
    """The events that counters of the days' examples can hold, with the columns of their keys."""
    occurred = F.floor(F.col("event_ts") / MICROS["s"])
    columns = _key_columns(spec, "visible_ts", occurred)
    if "item" in {each.column for each in spec.counters.distinct_counts}:
        columns.append(F.xxhash64("item_id").alias("item_hash"))
    for name in spec.distinct_event_attributes:
        value = F.col(f"event_{name}")
        columns.append(F.when(value.isNotNull(), F.xxhash64(value)).alias(f"key_{name}"))
    numbers = {number_column(spec, each.column) for each in spec.counters.numeric_aggregations}
    events = countable_events(spec, inputs, days)
    return events.select("visible_ts", "type", *sorted(numbers), *columns)


def impressions_of_days(spec: DataSpec, inputs: ExampleInputs, days: DayRange) -> DataFrame:
    """The impressions that landed on some days, with their request, as-of time, item and user."""
    impressions = inputs.events.filter(F.col("type") == spec.event_codes[spec.impression_type])
    impressions = impressions.filter(spark_io.day_range_predicate(*days))
    impressions = impressions.join(inputs.items, "item_id", "left")
    impressions = add_as_of_ts(spec, assign_request_ids(spec, impressions))
    names = spec.attributes.user
    return join_user_attributes(impressions, inputs.user_versions, "as_of_ts", names)


def first_input_day(spec: DataSpec, days: DayRange) -> date:
    """The first landing day of events that impressions of some days can count."""
    return days[0] - timedelta(days=counter_input_days(spec))


def countable_events(spec: DataSpec, inputs: ExampleInputs, days: DayRange) -> DataFrame:
    """The events that impressions of some days can count, with their items.

    They have their users, too, if counter keys need them.
    """
    counted_since = days[0] - timedelta(days=counter_horizon_days(spec))
    first_day = first_input_day(spec, days)
    recent = inputs.events.filter(spark_io.day_range_predicate(first_day, days[1]))
    recent = recent.filter(F.col("visible_ts") >= spec.day_start(counted_since))
    recent = recent.join(inputs.items, "item_id", "left")
    if not spec.user_counter_keys:
        return recent
    names = spec.user_counter_keys
    return join_user_attributes(recent, inputs.user_versions, "visible_ts", names)


def add_as_of_ts(spec: DataSpec, impressions: DataFrame) -> DataFrame:
    """Impressions with `as_of_ts`: the earliest as-of second of any impression of their request."""
    request = Window.partitionBy("day", "user_id", "request_id")
    return impressions.withColumn("as_of_ts", F.min(F.expr(as_of_expression(spec))).over(request))


def _is_item_known(ts_column: str) -> Column:
    return F.col("item_known_since") < F.col(ts_column)


def _key_columns(spec: DataSpec, ts_column: str, occurred: Column) -> list[Column]:
    """The parts of counter keys, as integers; null where unknown at the second in `ts_column`.

    Clocks show the second `occurred`.
    """
    keys = {
        "key_user": F.xxhash64("user_id"),
        "key_item": F.col("item_index").cast("bigint"),
        "key_surface": F.col("surface").cast("bigint"),
    }
    for name in item_counter_key_columns(spec):
        keys[name] = F.when(_is_item_known(ts_column), F.col(name))
    categories = {
        name: encode_attribute(attribute, F.col(f"user.attr_{name}"))
        for name, attribute in spec.user_counter_keys.items()
    }
    for name in spec.context_counter_keys:
        categories[name] = _encode_context(spec, name, occurred)
    for name, category in categories.items():
        keys[f"key_{name}"] = _known_category(category)
    return [key.alias(name) for name, key in keys.items()]


def _known_category(category: Column) -> Column:
    return F.when(category != MISSING_CATEGORY, category.cast("bigint"))


def join_user_attributes(
    rows: DataFrame, versions: DataFrame, ts_column: str, names: Iterable[str]
) -> DataFrame:
    """Rows with `user`: some of its latest attributes that were valid strictly before a second."""
    columns = [f"attr_{name}" for name in names]
    since = F.floor(F.col("valid_from") / MICROS["s"]).alias("user_known_since")
    user = F.struct("day", since, *columns).alias("user")  # of equal times, the latest day counts
    user_versions = versions.select("user_id", "valid_from", user)
    rows = rows.withColumn("valid_from", F.col(ts_column) * MICROS["s"])
    return asof_join(rows, user_versions, "user_id", "valid_from").drop("valid_from")


def _encoded_columns(spec: DataSpec) -> dict[str, Column]:
    """Encoded user and context attributes by column."""
    encoded = {
        f"user_{name}": encode_attribute(attribute, F.col(f"user.attr_{name}"))
        for name, attribute in spec.attributes.user.items()
    }
    for name in spec.attributes.context:
        encoded[f"ctx_{name}"] = _encode_context(spec, name, F.col("as_of_ts"))
    return encoded


def _encode_context(spec: DataSpec, name: str, seconds: Column) -> Column:
    """An encoded attribute of the context; a clock shows an epoch second."""
    attribute = spec.attributes.context[name]
    if isinstance(attribute, LocalTimeAttribute):
        return encode_local_time(spec, attribute, seconds)
    return encode_attribute(attribute, F.col(f"ctx_{name}"))
