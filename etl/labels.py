"""Impressions with their labels: which outcomes followed, within each objective's window."""

import functools
from datetime import date, timedelta

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from etl.spec.model import DataSpec, Objective
from etl.spec.units import DAY, MICROS
from etl.tables import contracts, delta
from etl.tables.lake import Lake


def label(lake: Lake, days: tuple[date, date]) -> dict[str, int]:
    """Replace `impressions` for the given landing days and those before whose labels may change.

    A label is null until its window has closed: by the end of the newest landed day. It changes
    after that only by an outcome that lands late.
    """
    spec = lake.spec
    events_contract = contracts.events(spec)
    version = lake.version(events_contract.name)
    events = delta.read(lake, events_contract, version)
    since = days[0] - timedelta(days=spec.ripens_after_days + -(-spec.lateness // DAY))
    newest = events.agg(F.max("day")).first()
    assert newest is not None
    horizon = spec.day_end(newest[0]) * MICROS["s"]

    recent = events.filter(F.col("day") >= F.lit(since))
    shown = recent.filter(F.col("type") == spec.event_codes[spec.impression])
    shown = shown.filter(F.col("day") <= F.lit(days[1]))
    rows = shown.join(credited_outcomes(spec, recent), "impression_id", "left")
    for name, objective in spec.objectives.items():
        rows = rows.withColumns(_label_columns(spec, name, objective, horizon))
    rows = rows.withColumn("request_id", request_id())
    where = delta.days_between(since, days[1])
    contract = contracts.impressions(spec)
    delta.replace(lake, contract, rows, where, {"events": version})
    return {"impressions": lake.rows(contract.name, (since, days[1]))}


def request_id() -> Column:
    """The request that the log names, else the user and the second."""
    second = F.floor(F.col("event_ts") / MICROS["s"]).cast("string")
    return F.coalesce("request_id", F.concat_ws("@", "user_id", second))


def _label_columns(
    spec: DataSpec, name: str, objective: Objective, horizon: int
) -> dict[str, Column]:
    closes = F.col("event_ts") + objective.window * MICROS["s"]
    mine = F.filter(
        F.coalesce("outcomes", F.array()),
        lambda o: (o["objective"] == name) & o["ts"].between(F.col("event_ts"), closes),
    )
    ready = F.col("event_ts") + objective.ripens_after * MICROS["s"]
    surfaces = [spec.surface_codes[s] for s in spec.surfaces_of(name)]
    ripe = (ready <= horizon) & F.col("surface").isin(surfaces)
    columns = {
        f"ready_{name}": ready,
        f"label_{name}": F.when(ripe, (F.size(mine) > 0).cast("int")),
    }
    if objective.value:
        total = F.aggregate(
            mine, F.lit(0.0), lambda sum_, o: sum_ + F.coalesce(o["value"], F.lit(0.0))
        )
        columns[f"value_{name}"] = F.when(ripe, total)
    return columns


def credited_outcomes(spec: DataSpec, events: DataFrame) -> DataFrame:
    """`outcomes` of each impression that gets credit for any: objective, ts, value, in order."""
    found = [
        credit(spec, events, objective).withColumn("objective", F.lit(name))
        for name, objective in spec.objectives.items()
    ]
    rows = functools.reduce(DataFrame.unionByName, found)
    outcome = F.struct("objective", "ts", "value")
    return rows.groupBy("impression_id").agg(
        F.sort_array(F.collect_list(outcome)).alias("outcomes")
    )


def credit(spec: DataSpec, events: DataFrame, objective: Objective) -> DataFrame:
    """Outcomes of an objective: `impression_id` that gets the credit, `ts` in µs, `value`.

    An outcome that names its impression is credited to it; any other to the last touch (the
    objective's `credit` event, else the impression) of its user and item at or before it.
    """
    outcome = F.col("type") == spec.event_codes[objective.event]
    named = events.filter(outcome & F.col("impression_id").isNotNull())
    touch = F.col("type") == spec.event_codes[objective.credit or spec.impression]
    rest = events.filter((outcome & F.col("impression_id").isNull()) | touch)
    before = (
        Window.partitionBy("user_id", "item_id")
        .orderBy("event_ts", F.when(touch, 0).otherwise(1), "event_id")
        .rowsBetween(Window.unboundedPreceding, Window.currentRow)
    )
    touched = F.last(F.when(touch, F.col("impression_id")), ignorenulls=True).over(before)
    rest = rest.withColumn("touched", touched).filter(outcome & F.col("touched").isNotNull())
    rest = rest.withColumn("impression_id", F.col("touched"))
    columns = [F.col("impression_id"), F.col("event_ts").alias("ts"), F.col("value")]
    return named.select(*columns).unionByName(rest.select(*columns))


if __name__ == "__main__":
    import sys

    from etl.cli import run
    from etl.commands import labels as command

    sys.exit(run(command, sys.argv[1:], "etl/labels.py"))
