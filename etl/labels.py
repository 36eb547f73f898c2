"""Impressions with their labels: which outcomes followed, within each objective's window."""

import functools
from datetime import date, timedelta

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from etl.spec.model import DataSpec, Objective
from etl.spec.units import DAY, MICROS
from etl.tables import contracts, delta
from etl.tables.lake import Lake

CREDIT = ("event_id", "impression_id", "user_id", "item_id", "event_ts", "visible_ts", "value")


def label(lake: Lake, days: tuple[date, date]) -> dict[str, int]:
    """Replace `impressions` for the given landing days and those before that may ripen on them.

    A label is null until it is ready: until its window, and the time to settle, have passed and
    the impression has landed. It counts the outcomes that could be seen by then, so that what
    lands later does not change it, and whoever learns it knows nothing of later days.
    """
    spec = lake.spec
    events_contract = contracts.events(spec)
    version = lake.version(events_contract.name)
    events = delta.read(lake, events_contract, version)
    lateness = timedelta(days=1 + -(-spec.lateness // DAY))
    since = days[0] - timedelta(days=spec.ripens_after_days) - lateness
    newest = events.agg(F.max("day")).first()
    assert newest is not None
    horizon = spec.day_end(newest[0]) * MICROS["s"]

    recent = events.filter(F.col("day") >= F.lit(since - lateness))
    shown = recent.filter(F.col("type") == spec.event_codes[spec.impression])
    shown = shown.filter(delta.days_between(since, days[1]))
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
    settled = F.col("event_ts") + objective.ripens_after * MICROS["s"]
    ready = F.greatest(settled, F.col("visible_ts") * MICROS["s"])
    mine = F.filter(
        F.coalesce("outcomes", F.array()),
        lambda o: (
            (o["objective"] == name)
            & o["ts"].between(F.col("event_ts"), closes)
            & (o["visible_ts"] * MICROS["s"] <= ready)
        ),
    )
    surfaces = [spec.surface_codes[s] for s in spec.surfaces_of(name)]
    ripe = (ready < horizon) & F.col("surface").isin(surfaces)
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
    """`outcomes` of each impression that gets credit for any, in order of objective and time."""
    found = [
        credited(spec, events, objective.event, objective.credit).select(
            "impression_id",
            F.lit(name).alias("objective"),
            F.col("event_ts").alias("ts"),
            "value",
            "visible_ts",
        )
        for name, objective in spec.objectives.items()
    ]
    rows = functools.reduce(DataFrame.unionByName, found)
    outcome = F.struct("objective", "ts", "value", "visible_ts")
    return rows.groupBy("impression_id").agg(
        F.sort_array(F.collect_list(outcome)).alias("outcomes")
    )


def credited(spec: DataSpec, events: DataFrame, event: str, credit: str | None) -> DataFrame:
    """Events of a type, `impression_id` being the impression that gets the credit for each.

    An event that names its impression is credited to it; any other to the last touch (a `credit`
    event, else an impression) of its user and item at or before it that could be seen when it
    could be: a touch that lands later does not move a credit that was given.
    """
    mine = events.filter(F.col("type") == spec.event_codes[event]).select(*CREDIT)
    if event == spec.impression:
        return mine
    named = mine.filter(F.col("impression_id").isNotNull())
    touches = credited(spec, events, credit or spec.impression, None)
    touch = F.struct("event_ts", "event_id", "impression_id").alias("touch")
    touches = touches.select("user_id", "item_id", "visible_ts", touch)
    unnamed = mine.filter(F.col("impression_id").isNull()).drop("impression_id")
    seen = (F.col("touch.event_ts") <= F.col("e.event_ts")) & (
        F.col("t.visible_ts") <= F.col("e.visible_ts")
    )
    pairs = unnamed.alias("e").join(touches.alias("t"), ["user_id", "item_id"]).filter(seen)
    own = [F.col(f"e.{name}") for name in unnamed.columns if name not in {"user_id", "item_id"}]
    last = pairs.groupBy("user_id", "item_id", *own).agg(F.max("touch").alias("touch"))
    return named.unionByName(last.select(*unnamed.columns, "touch.impression_id"))


if __name__ == "__main__":
    import sys

    from etl.cli import run
    from etl.commands import labels as command

    sys.exit(run(command, sys.argv[1:], "etl/labels.py"))
