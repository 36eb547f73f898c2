"""The item index: item_id -> item_ix. An index is given once and never reused."""

from datetime import date

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from etl.tables import contracts, delta
from etl.tables.lake import Lake
from features.item_versions import build_versions


def index_items(lake: Lake, days: tuple[date, date]) -> dict[str, int]:
    """Give an index to each item first seen in the given days; every other item keeps its own.

    Indexes begin after those reserved (`contracts.RESERVED_ITEMS`). Within a day the popular come
    first, so that frequent items have small numbers; the days are taken one after the other, so a
    range gives what its days would. Days may be run again at any time: an index is given once and
    never reused, not even that of an item that a corrected log no longer holds.
    """
    versions = {"events": lake.version("events")}
    contract = contracts.items(lake.spec)
    seen = _first_seen(lake, versions["events"], days)
    taken = contracts.RESERVED_ITEMS - 1
    if lake.exists(contract.name):
        versions["items"] = lake.version(contract.name)
        known = delta.read(lake, contract, versions["items"])
        there = known.select("item_id", "item_ix", F.col("day").alias("known_day"))
        inside = F.col("known_day").between(F.lit(days[0]), F.lit(days[1]))
        seen = seen.join(there, "item_id", "full").filter(F.col("known_day").isNull() | inside)
        seen = seen.withColumn("day", F.coalesce("day", "known_day"))
        top = known.agg(F.max("item_ix")).first()
        taken = (top and top[0]) or taken
    else:
        seen = seen.withColumn("item_ix", F.lit(None).cast("int"))
    fresh = Window.partitionBy(F.col("item_ix").isNull()).orderBy("day", F.desc("n"), "item_id")
    index = F.coalesce("item_ix", F.row_number().over(fresh) + taken)
    rows = seen.withColumn("item_ix", index)
    delta.replace(lake, contract, rows, delta.days_between(*days), versions)
    return {"items": lake.rows(contract.name)} | build_versions(lake, days)


def item_index() -> Column:
    """The index of a row's `item_id`; one of those reserved where `item_ix` has none."""
    unseen = F.pmod(F.xxhash64("item_id"), F.lit(contracts.RESERVED_ITEMS - 1)) + 1
    return F.coalesce("item_ix", unseen.cast("int"))


def _first_seen(lake: Lake, version: int, days: tuple[date, date]) -> DataFrame:
    events = delta.read(lake, contracts.events(lake.spec), version)
    daily = events.filter(delta.days_between(*days)).groupBy("item_id", "day").count()
    return daily.groupBy("item_id").agg(
        F.min("day").alias("day"), F.min_by("count", "day").alias("n")
    )
