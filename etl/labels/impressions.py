"""The labels step: impressions with their requests and the labels of each objective."""

import functools
from datetime import date, timedelta

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from etl.labels.attribution import attribute_outcomes, outcomes_without_impression
from etl.spec.model import DataSpec
from etl.spec.units import MICROS
from etl.tables import schemas, spark_io
from etl.tables.lake import Lake


def assign_request_ids(spec: DataSpec, impressions: DataFrame) -> DataFrame:
    """Impressions with a `request_id`: as logged, or derived from user, surface and second.

    Impressions of a user on a surface without a logged request are one request while each follows
    the previous one within `request_session_gap`. Requests end with their landing day, so that a
    day's requests do not depend on the days that are processed with it.
    """
    second = F.floor(F.col("event_ts") / MICROS["s"])
    order = Window.partitionBy("day", "user_id", "surface", F.col("request_id").isNull())
    order = order.orderBy("event_ts", "event_id")
    gap = second - F.lag(second).over(order)
    is_first = F.coalesce(gap > spec.request_session_gap, F.lit(True))
    impressions = impressions.withColumn("request_start", F.when(is_first, second))
    start = F.last("request_start", ignorenulls=True).over(order)
    derived_id = F.concat_ws("@", "user_id", "surface", start)
    request_id = F.coalesce("request_id", derived_id)
    return impressions.withColumn("request_id", request_id).drop("request_start")


def label_impressions(lake: Lake, days: tuple[date, date]) -> dict[str, int]:
    """Replace `impressions` of a range of landing days, and of earlier days that mature on them.

    A label is null until it is mature: until its window and grace period have passed and the
    impression is visible. It counts the outcomes that are visible at that time, so that it does not
    change when others land later, and contains no information of later days.

    Returns:
        The number of impressions, and of the days' outcomes that name an unknown impression.
    """
    spec = lake.spec
    names = ("events", "attributes_item") if spec.uses_item_attribute_attribution else ("events",)
    versions = {name: lake.version(name) for name in names}
    events = spark_io.read_table(lake, schemas.events(spec), versions["events"])
    lateness = timedelta(days=1 + spec.allowed_lateness_days)
    first_day = days[0] - timedelta(days=spec.label_maturity_days) - lateness
    data_until_us = spec.day_end(lake.day_range("events")[1]) * MICROS["s"]

    recent = events.filter(F.col("day") >= F.lit(first_day - lateness))
    impressions = recent.filter(F.col("type") == spec.event_codes[spec.impression_type])
    where = spark_io.day_range_predicate(first_day, days[1])
    impressions = assign_request_ids(spec, impressions.filter(where))
    rows = impressions.join(outcomes_by_impression(lake, recent), "impression_id", "left")
    for name in spec.label_windows:
        rows = rows.withColumns(_label_columns(spec, name, data_until_us))
    schema = schemas.impressions(spec)
    spark_io.replace_partitions(lake, schema, rows, where, versions)

    types = {spec.event_codes[objective.event] for objective in spec.objectives.values()}
    outcomes = recent.filter(spark_io.day_range_predicate(*days)).filter(F.col("type").isin(types))
    unknown = outcomes_without_impression(spec, recent, outcomes)
    return {
        "impressions": lake.count_rows(schema.name, (first_day, days[1])),
        "outcomes of unknown impressions": unknown.count(),
    }


def _label_columns(spec: DataSpec, label_name: str, data_until_us: int) -> dict[str, Column]:
    """Maturity time (µs), label and, if the objective has one, value of a label window."""
    objective_name, window = spec.label_windows[label_name]
    objective = spec.objectives[objective_name]
    window_end = F.col("event_ts") + window * MICROS["s"]
    grace_end = window_end + objective.label_grace_period * MICROS["s"]
    mature_ts = F.greatest(grace_end, F.col("visible_ts") * MICROS["s"])

    def is_counted(outcome: Column) -> Column:
        is_in_window = outcome["ts"].between(F.col("event_ts"), window_end)
        is_visible = outcome["visible_ts"] * MICROS["s"] <= mature_ts
        return (outcome["objective"] == objective_name) & is_in_window & is_visible

    def add_value(total: Column, outcome: Column) -> Column:
        return total + F.coalesce(outcome["value"], F.lit(0.0))

    outcomes = F.filter(F.coalesce("outcomes", F.array()), is_counted)
    surfaces = [spec.surface_codes[name] for name in spec.surfaces_of(objective_name)]
    has_label = (mature_ts < data_until_us) & F.col("surface").isin(surfaces)
    columns = {
        f"label_mature_ts_{label_name}": mature_ts,
        f"label_{label_name}": F.when(has_label, (F.size(outcomes) > 0).cast("int")),
    }
    if objective.value:
        value = F.aggregate(outcomes, F.lit(0.0), add_value)
        columns[f"value_{label_name}"] = F.when(has_label, value)
    return columns


def outcomes_by_impression(lake: Lake, events: DataFrame) -> DataFrame:
    """The attributed outcomes of each impression, ordered by objective and time.

    Returns:
        `impression_id` and `outcomes`, an array of structs; no row for an impression without any.
    """
    by_objective = [
        attribute_outcomes(lake, events, objective).select(
            "impression_id",
            F.lit(name).alias("objective"),
            F.col("event_ts").alias("ts"),
            "value",
            "visible_ts",
        )
        for name, objective in lake.spec.objectives.items()
    ]
    rows = functools.reduce(DataFrame.unionByName, by_objective)
    outcome = F.struct("objective", "ts", "value", "visible_ts")
    outcomes = F.sort_array(F.collect_list(outcome)).alias("outcomes")
    return rows.groupBy("impression_id").agg(outcomes)
