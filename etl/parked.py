"""Clean events that are not used: too late for what was built, or more than a person makes."""

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from etl.clock import day_start
from etl.spec.model import DataSpec
from etl.spec.units import MICROS

TOO_LATE = "too late"


def too_late(spec: DataSpec) -> Column:
    """Whether an event happened longer before its landing day than the spec waits."""
    return F.expr(f"event_ts < ({day_start(spec)} - {spec.lateness}) * {MICROS['s']}")


def park(spec: DataSpec, fresh: DataFrame, late: DataFrame) -> tuple[DataFrame, DataFrame]:
    """Events to keep, and those to park with a `reason`: late ones, and what machines made.

    Of a user with more than `most_events_a_day`, the first so many to become visible on the day are
    kept: what comes later changes nothing of before. Those users are found first, so that none but
    them is sorted.
    """
    most = spec.most_events_a_day
    parked = late.withColumn("reason", F.lit(TOO_LATE))
    per_user = fresh.groupBy("day", "user_id").count()
    machines = per_user.filter(F.col("count") > most).select("day", "user_id")
    if machines.isEmpty():
        return fresh, parked
    order = Window.partitionBy("day", "user_id").orderBy("visible_ts", "event_ts", "event_id")
    theirs = fresh.join(machines, ["day", "user_id"], "left_semi")
    ranked = theirs.withColumn("place_of_day", F.row_number().over(order))
    over = F.col("place_of_day") > most
    reason = F.lit(f"more than {most:,} events of a user and day")
    others = fresh.join(machines, ["day", "user_id"], "left_anti")
    kept = others.unionByName(ranked.filter(~over).drop("place_of_day"))
    capped = ranked.filter(over).drop("place_of_day").withColumn("reason", reason)
    return kept, parked.unionByName(capped)
