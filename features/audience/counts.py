"""The `audience_counts` table: impressions of campaigns by the labels of all data providers."""

import functools
from datetime import timedelta

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from etl.attribute_versions import first_item_values
from etl.event_time import day_end_sql
from etl.label_versions import labels_from
from etl.spec.sections import UNKNOWN_LABEL
from etl.spec.units import MICROS, DayRange
from etl.tables import audience_schemas, schemas, spark_io
from etl.tables.lake import Lake


def count_audiences(lake: Lake, days: DayRange) -> dict[str, int]:
    """Replace the given days of `audience_counts`, by the landing day of the impression."""
    versions = {
        name: lake.version(name) for name in ("events", "attributes_item", "audience_labels")
    }
    counts = [_counts_of(lake, name, days, versions) for name in lake.spec.audiences]
    schema = audience_schemas.audience_counts(lake.spec)
    rows = functools.reduce(DataFrame.unionByName, counts)
    where = spark_io.day_range_predicate(*days)
    spark_io.replace_partitions(lake, schema, rows, where, versions)
    return {schema.name: lake.count_rows(schema.name, days)}


def _counts_of(lake: Lake, name: str, days: DayRange, versions: dict[str, int]) -> DataFrame:
    spec, audience = lake.spec, lake.spec.audiences[name]
    events = spark_io.read_table(lake, schemas.events(spec), versions["events"])
    impressions = events.filter(spark_io.day_range_predicate(*days))
    impressions = impressions.filter(F.col("type") == spec.event_codes[spec.impression_type])
    values = first_item_values(lake, audience.campaign)
    impressions = impressions.join(values, "item_id")
    # A device's clock may run ahead: labels of the day after have not landed yet.
    day_end_us = F.expr(f"{day_end_sql(spec)} * {MICROS['s']}")
    # A version that lands later may be the first one until the end of the day, too.
    has_arrived = (F.col("item_landing_day") <= F.col("day")) & (
        F.col("item_known_since") <= day_end_us
    )
    is_known = F.col("item_attribute").isNotNull() & has_arrived
    impressions = impressions.filter(is_known).select(
        *("user_id", F.least("event_ts", "ingest_ts", day_end_us).alias("ts")),
        *(F.col("item_attribute").alias("campaign"), "day"),
    )
    first_event_day = days[0] - timedelta(days=spec.allowed_lateness_days + 1)
    stored = labels_from(lake, first_event_day, versions["audience_labels"])
    stored = stored.filter((F.col("audience") == name) & (F.col("day") <= F.lit(days[1])))
    labels = stored.select("user_id", F.col("valid_from").alias("ts"), "provider", "label", "day")
    counts = count_by_labels(impressions, labels, audience.providers)
    return counts.withColumn("audience", F.lit(name))


def count_by_labels(
    impressions: DataFrame, labels: DataFrame, providers: tuple[str, ...]
) -> DataFrame:
    """Impressions and their users by day, campaign and labels; the inputs of `join_labels`."""
    labelled = join_labels(impressions, labels, providers)
    return labelled.groupBy("day", "campaign", "labels").agg(
        F.count("*").alias("impressions"), F.count_distinct("user_id").alias("users")
    )


def join_labels(impressions: DataFrame, labels: DataFrame, providers: tuple[str, ...]) -> DataFrame:
    """Impressions with `labels`: the latest label of each provider strictly before `ts`.

    `impressions` have user_id, ts, campaign and day, `labels` user_id, ts, provider, label and day:
    of labels of one time, that of the latest day counts. A union and one window sort the rows of a
    user once.
    """
    rows = impressions.unionByName(labels, allowMissingColumns=True)
    up_to_row = (
        Window.partitionBy("user_id")
        .orderBy("ts", F.asc_nulls_last("campaign"), "day")  # equal times: impressions come first
        .rowsBetween(Window.unboundedPreceding, Window.currentRow)
    )
    latest = [
        F.coalesce(
            F.last(F.when(F.col("provider") == provider, F.col("label")), ignorenulls=True).over(
                up_to_row
            ),
            F.lit(UNKNOWN_LABEL),
        )
        for provider in providers
    ]
    rows = rows.withColumn("labels", F.array(*latest)).filter("campaign IS NOT NULL")
    return rows.select("user_id", "campaign", "day", "labels")
