"""Outcomes that were retracted after the labels that count them were final, within some time.

Labels do not change; table `late_retractions` has what value, accounting and net rates need.
"""

import functools
from datetime import timedelta

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from etl.ingest.timestamps import local_date
from etl.labels import counted_outcomes, first_retraction, outcomes_by_impression
from etl.spec.model import DataSpec
from etl.spec.units import MICROS, DayRange
from etl.tables import label_schemas, schemas, spark_io
from etl.tables.lake import Lake


def record_late_retractions(lake: Lake, days: DayRange) -> int:
    """Replace `late_retractions` of the days on which they became visible; returns how many.

    By then all outcomes that a label counts have landed, so that runs of any days find the same.
    Those that follow the final label by more than `within` of their objective are left out. Only
    events of users with such retractions are read, from the earliest impressions on whose labels
    were final at most `within` before.
    """
    spec = lake.spec
    versions = {"events": lake.version("events")}
    events = spark_io.read_table(lake, schemas.events(spec), versions["events"])
    first_day = days[0] - timedelta(days=spec.retraction_horizon_days)
    recent = events.filter((F.col("day") >= F.lit(first_day)) & (F.col("day") <= F.lit(days[1])))
    recent = recent.join(_users_with_retractions(spec, recent, days), "user_id", "left_semi")
    impressions = recent.filter(F.col("type") == spec.event_codes[spec.impression_type])
    outcomes = outcomes_by_impression(lake, recent, impressions)
    rows = impressions.drop("value", "day").join(outcomes, "impression_id")
    found = [
        _late_retractions(spec, rows, name)
        for name, objective in spec.objectives.items()
        if objective.retracted_by
    ]
    late = functools.reduce(DataFrame.unionByName, found)
    schema, where = label_schemas.late_retractions(spec), spark_io.day_range_predicate(*days)
    spark_io.replace_partitions(lake, schema, late.filter(where), where, versions)
    return lake.count_rows(schema.name, days)


def _users_with_retractions(spec: DataSpec, events: DataFrame, days: DayRange) -> DataFrame:
    """Users with a retraction that became visible on some days."""
    codes = [spec.event_codes[name] for name in spec.retraction_types]
    is_visible = F.col("visible_ts").between(spec.day_start(days[0]), spec.day_end(days[1]) - 1)
    return events.filter(F.col("type").isin(codes) & is_visible).select("user_id").distinct()


def _late_retractions(spec: DataSpec, rows: DataFrame, name: str) -> DataFrame:
    """The late retractions of an objective, of impressions with `outcomes`."""
    objective = spec.objectives[name]
    assert objective.retracted_by is not None
    mature_ts, counted = counted_outcomes(spec, name)
    surfaces = [spec.surface_codes[surface] for surface in spec.surfaces_of(name)]
    rows = rows.filter(F.col("surface").isin(surfaces))
    rows = rows.withColumns({"mature_ts": mature_ts, "counted": counted})
    rows = rows.withColumn("outcome", F.explode("counted"))
    first = first_retraction(spec, objective, F.col("outcome"))
    assert first is not None
    label_mature_ts = F.floor(F.col("mature_ts") / MICROS["s"])
    elapsed = F.col("retraction.visible_ts") - label_mature_ts
    rows = rows.withColumn("retraction", first).filter(elapsed <= objective.retracted_by.within)

    def is_left(other: Column) -> Column:
        retraction = first_retraction(spec, objective, other)
        assert retraction is not None
        is_later = retraction["visible_ts"] > F.col("retraction.visible_ts")
        return F.coalesce(is_later, F.lit(True))

    return rows.select(
        "impression_id",
        "user_id",
        F.lit(name).alias("objective"),
        "surface",
        F.col("outcome.event_id").alias("outcome_id"),
        F.col("retraction.id").alias("retraction_id"),
        F.col("retraction.visible_ts").alias("retracted_ts"),
        label_mature_ts.alias("label_mature_ts"),
        F.size(F.filter("counted", is_left)).alias("outcomes_left"),
        F.col("outcome.value").alias("value"),
        local_date(spec, F.col("retraction.visible_ts")).alias("day"),
        "bucket",
    )
