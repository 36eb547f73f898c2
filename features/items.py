"""The item index: item_id -> item_ix. An index is given once and never reused."""

from datetime import date

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from etl.spec.model import DataSpec
from etl.tables import contracts, delta
from etl.tables.lake import Lake
from features.encoding import encode


def index_items(lake: Lake, days: tuple[date, date]) -> dict[str, int]:
    """Give an index to each item first seen in the given days; every other item keeps its own.

    Index 0 is no item. Within a day the popular come first, so that frequent items have small
    numbers; the days are taken one after the other, so a range gives what its days would. Days
    may be run again at any time: an index is given once and never reused, not even that of an
    item that a corrected log no longer holds.
    """
    spec = lake.spec
    versions = {name: lake.version(name) for name in ("events", "attributes_item")}
    contract = contracts.items(spec)
    seen = _first_seen(lake, versions["events"], days)
    if lake.exists(contract.name):
        versions["items"] = lake.version(contract.name)
        known = delta.read(lake, contract, versions["items"])
        there = known.select("item_id", "item_ix", F.col("day").alias("known_day"))
        inside = F.col("known_day").between(F.lit(days[0]), F.lit(days[1]))
        seen = seen.join(there, "item_id", "full").filter(F.col("known_day").isNull() | inside)
        seen = seen.withColumn("day", F.coalesce("day", "known_day"))
        top = known.agg(F.max("item_ix")).first()
        taken = (top and top[0]) or 0
    else:
        seen, taken = seen.withColumn("item_ix", F.lit(None).cast("int")), 0
    fresh = Window.partitionBy(F.col("item_ix").isNull()).orderBy("day", F.desc("n"), "item_id")
    index = F.coalesce("item_ix", F.row_number().over(fresh) + taken)
    rows = _with_attributes(lake, seen.withColumn("item_ix", index), versions["attributes_item"])
    delta.replace(lake, contract, rows, delta.days_between(*days), versions)
    return {"items": lake.rows(contract.name)}


def _first_seen(lake: Lake, version: int, days: tuple[date, date]) -> DataFrame:
    events = delta.read(lake, contracts.events(lake.spec), version)
    daily = events.filter(delta.days_between(*days)).groupBy("item_id", "day").count()
    return daily.groupBy("item_id").agg(
        F.min("day").alias("day"), F.min_by("count", "day").alias("n")
    )


def _with_attributes(lake: Lake, items: DataFrame, version: int) -> DataFrame:
    """Items with their first version, if it had landed by the day on which they were seen."""
    spec: DataSpec = lake.spec
    stored = delta.read(lake, contracts.attributes(spec, "item"), version)
    names = [name for name in stored.columns if name not in {"item_id", "valid_from", "day"}]
    seen = items.select("item_id", F.col("day").alias("seen_day"))
    landed = stored.join(seen, "item_id").filter(F.col("day") <= F.col("seen_day"))
    first = landed.groupBy("item_id").agg(
        F.min_by(F.struct(*names), F.struct("valid_from", "day")).alias("a")
    )
    rows = items.join(first, "item_id", "left")
    encoded = [
        encode(attribute, F.col(f"a.x_{name}")).alias(f"i_{name}")
        for name, attribute in spec.attributes.item.items()
    ]
    keys = []
    for name in contracts.item_key_columns(spec):
        value = F.col(f"a.x_{name.removeprefix('k_')}")
        keys.append(F.when(value.isNotNull(), F.xxhash64(value)).alias(name))
    return rows.select("item_id", "item_ix", "day", *encoded, *keys)


if __name__ == "__main__":
    import sys

    from etl.cli import run
    from features.commands import items as command

    sys.exit(run(command, sys.argv[1:], "features/items.py"))
