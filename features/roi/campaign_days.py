"""The `campaign_days` table: spend of campaigns, and outcomes of their impressions, by day."""

from collections.abc import Sequence
from datetime import date, timedelta

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from etl.attribute_versions import first_item_values
from etl.labels import first_relabeled_day
from etl.spec.model import DataSpec
from etl.spec.units import DayRange
from etl.tables import label_schemas, roi_schemas, spark_io
from etl.tables.lake import Lake


def build_campaign_days(lake: Lake, days: DayRange) -> dict[str, int]:
    """Replace the given days of `campaign_days`, by the landing day of the impressions.

    Days before them are built again if more of their labels are final, or if the days have
    retractions of their outcomes.
    """
    spec = lake.spec
    assert spec.roi
    days = first_changed_day(lake, days), days[1]
    names = ("impressions", "attributes_item", "campaign_spend")
    versions = {name: lake.version(name) for name in names}
    where = spark_io.day_range_predicate(*days)
    impressions = spark_io.read_table(
        lake, label_schemas.impressions(spec), versions["impressions"]
    ).filter(where)
    if has_retractions(spec):
        schema = label_schemas.late_retractions(spec)
        versions[schema.name] = lake.version(schema.name)
        retractions = spark_io.read_table(lake, schema, versions[schema.name])
        # None precedes its outcome.
        retractions = retractions.filter(F.col("day") >= F.lit(days[0]))
        impressions = net_of_retractions(spec, impressions, retractions)
    for attribute in (spec.roi.campaign, *spec.roi.groups):
        values = first_item_values(lake, attribute).select("item_id", "item_attribute")
        impressions = impressions.join(values, "item_id", "left")
        impressions = impressions.withColumnRenamed("item_attribute", f"item_{attribute}")
    spend = spark_io.read_table(
        lake, roi_schemas.campaign_spend(spec), versions["campaign_spend"]
    ).filter(where)
    rows = campaign_days(spec, impressions, spend)
    schema = roi_schemas.campaign_days(spec)
    spark_io.replace_partitions(lake, schema, rows, where, versions)
    return {schema.name: lake.count_rows(schema.name, days)}


def first_changed_day(lake: Lake, days: DayRange) -> date:
    """The first of some days, and of those built before, whose outcomes the days have changed."""
    built, available = (lake.rows_by_day(name) for name in ("campaign_days", "impressions"))
    earliest = first_relabeled_day(lake.spec, days)
    if has_retractions(lake.spec):
        of_retractions = days[0] - timedelta(days=lake.spec.retraction_horizon_days)
        earliest = min(earliest, of_retractions)
    return min([days[0], *(day for day in built if day >= earliest and day in available)])


def has_retractions(spec: DataSpec) -> bool:
    """Whether outcomes of the objective of campaigns may be retracted."""
    assert spec.roi
    return spec.objectives[spec.roi.objective].retracted_by is not None


def net_of_retractions(spec: DataSpec, impressions: DataFrame, retractions: DataFrame) -> DataFrame:
    """Impressions whose label and value are without the outcomes of rows of `late_retractions`.

    A label is 0 if none of its outcomes is left.
    """
    assert spec.roi
    label, value = (f"{kind}_{spec.roi.objective}" for kind in ("label", "value"))
    retracted = (
        retractions.filter(F.col("objective") == spec.roi.objective)
        .groupBy("impression_id")
        .agg(F.min("outcomes_left").alias("left"), F.sum("value").alias("retracted"))
    )
    is_none_left = F.coalesce(F.col("left") == 0, F.lit(False))
    left = F.when(is_none_left, 0.0).otherwise(
        F.col(value) - F.coalesce(F.col("retracted"), F.lit(0.0))
    )
    net = {
        label: F.when(is_none_left, F.lit(0)).otherwise(F.col(label)),
        value: F.greatest(left, F.lit(0.0)),
    }
    joined = impressions.join(retracted, "impression_id", "left")
    return joined.withColumns(net).drop("left", "retracted")


def campaign_days(spec: DataSpec, impressions: DataFrame, spend: DataFrame) -> DataFrame:
    """Rows of `campaign_days` of impressions with `item_…` attributes, and rows of spend.

    A campaign that spent and had no impressions has no outcomes; one without spend spent 0. On
    surfaces without the objective no label is ever known, and none is waited for. A campaign's
    groups are the most frequent values of its impressions, of several the first in their order. An
    `incremental_share` is the mean of those of its rows of spend.
    """
    roi = spec.roi
    assert roi
    label = F.col(f"label_{roi.objective}")
    surfaces = [spec.surface_codes[name] for name in spec.surfaces_of(roi.objective)]
    has_label = F.when(F.col("surface").isin(surfaces), label.isNotNull().cast("double"))
    groups: Sequence[str] = roi.groups
    outcomes = (
        impressions.filter(F.col(f"item_{roi.campaign}").isNotNull())
        .groupBy(F.col(f"item_{roi.campaign}").alias("campaign"), "day")
        .agg(
            F.count("*").alias("impressions"),
            F.coalesce(F.sum(label), F.lit(0)).alias("conversions"),
            F.coalesce(F.sum(f"value_{roi.objective}"), F.lit(0.0)).alias("value"),
            F.avg(has_label).alias("arrived"),
            *[F.mode(f"item_{name}", deterministic=True).alias(name) for name in groups],
        )
    )
    shares = ["incremental_share"] if roi_schemas.has_incremental_share(spec) else []
    billed = spend.groupBy("campaign", "day").agg(
        F.sum("spend").alias("spend"), *[F.avg(name).alias(name) for name in shares]
    )
    rows = outcomes.join(billed, ["campaign", "day"], "full")
    defaults: dict[str, bool | float | int | str] = {
        "impressions": 0,
        "conversions": 0,
        "value": 0.0,
        "arrived": 0.0,  # without impressions on its surfaces no conversions can be known
        "spend": 0.0,
    }
    known = [F.coalesce(F.col(name), F.lit("unknown")).alias(name) for name in groups]
    names = ("campaign", "day", *defaults, *shares)
    return rows.fillna(defaults).select(
        *map(F.col, names), *known, F.lit(roi.currency).alias("currency")
    )
