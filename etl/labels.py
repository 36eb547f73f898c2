"""Impressions with their labels: which outcomes followed, within each objective's windows."""

import functools
from datetime import date, timedelta

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from etl.attribution import attribute_outcomes, unknown_impressions
from etl.requests import with_requests
from etl.spec.model import DataSpec
from etl.spec.units import MICROS
from etl.tables import contracts, delta
from etl.tables.lake import Lake


def label(lake: Lake, days: tuple[date, date]) -> dict[str, int]:
    """Replace `impressions` for the given landing days and those before that may ripen on them.

    A label is null until it is ready: until its window, and the time to settle, have passed and
    the impression has landed. It counts the outcomes that could be seen by then, so that what
    lands later does not change it, and whoever learns it knows nothing of later days.
    """
    spec = lake.spec
    names = ("events", "attributes_item") if spec.attributes_by_items else ("events",)
    versions = {name: lake.version(name) for name in names}
    events = delta.read(lake, contracts.events(spec), versions["events"])
    lateness = timedelta(days=1 + spec.lateness_days)
    since = days[0] - timedelta(days=spec.ripens_after_days) - lateness
    horizon = spec.day_end(lake.days("events")[1]) * MICROS["s"]

    recent = events.filter(F.col("day") >= F.lit(since - lateness))
    shown = recent.filter(F.col("type") == spec.event_codes[spec.impression])
    shown = with_requests(spec, shown.filter(delta.days_between(since, days[1])))
    rows = shown.join(outcomes_by_impression(lake, recent), "impression_id", "left")
    for name in spec.labels:
        rows = rows.withColumns(_label_columns(spec, name, horizon))
    where = delta.days_between(since, days[1])
    contract = contracts.impressions(spec)
    delta.replace(lake, contract, rows, where, versions)
    types = {spec.event_codes[objective.event] for objective in spec.objectives.values()}
    outcomes = recent.filter(delta.days_between(*days)).filter(F.col("type").isin(types))
    return {
        "impressions": lake.rows(contract.name, (since, days[1])),
        "outcomes of unknown impressions": unknown_impressions(spec, recent, outcomes).count(),
    }


def _label_columns(spec: DataSpec, name: str, horizon: int) -> dict[str, Column]:
    of, window = spec.labels[name]
    objective = spec.objectives[of]
    closes = F.col("event_ts") + window * MICROS["s"]
    settled = closes + objective.settle * MICROS["s"]
    ready = F.greatest(settled, F.col("visible_ts") * MICROS["s"])
    mine = F.filter(
        F.coalesce("outcomes", F.array()),
        lambda o: (
            (o["objective"] == of)
            & o["ts"].between(F.col("event_ts"), closes)
            & (o["visible_ts"] * MICROS["s"] <= ready)
        ),
    )
    surfaces = [spec.surface_codes[s] for s in spec.surfaces_of(of)]
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


def outcomes_by_impression(lake: Lake, events: DataFrame) -> DataFrame:
    """`outcomes` of each impression to which any is attributed, in order of objective and time."""
    found = [
        attribute_outcomes(lake, events, objective).select(
            "impression_id",
            F.lit(name).alias("objective"),
            F.col("event_ts").alias("ts"),
            "value",
            "visible_ts",
        )
        for name, objective in lake.spec.objectives.items()
    ]
    rows = functools.reduce(DataFrame.unionByName, found)
    outcome = F.struct("objective", "ts", "value", "visible_ts")
    return rows.groupBy("impression_id").agg(
        F.sort_array(F.collect_list(outcome)).alias("outcomes")
    )
