"""What was known of items, and since when: their slowly changing attributes as models read them."""

from datetime import date

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from etl.spec.units import MICROS
from etl.tables import contracts, delta
from etl.tables.lake import Lake
from features.encoding import encode


def build_versions(lake: Lake, days: tuple[date, date]) -> dict[str, int]:
    """Replace the given days of `item_versions`: what landed on them, of items seen by then.

    What had landed before an item was first seen belongs to the day on which it was.
    """
    spec, contract = lake.spec, contracts.item_versions(lake.spec)
    versions = {name: lake.version(name) for name in ("items", "attributes_item")}
    items = delta.read(lake, contracts.items(spec), versions["items"])
    stored = delta.read(lake, contracts.attributes(spec, "item"), versions["attributes_item"])
    seen = items.select("item_id", "item_ix", F.col("day").alias("seen_day"))
    rows = stored.join(seen, "item_id").withColumn("day", F.greatest("day", "seen_day"))
    where = delta.days_between(*days)
    encoded = {
        f"i_{name}": encode(attribute, F.col(f"x_{name}"))
        for name, attribute in spec.attributes.item.items()
    }
    keys = {}
    for name in contracts.item_key_columns(spec):
        value = F.col(f"x_{name.removeprefix('k_')}")
        keys[name] = F.when(value.isNotNull(), F.xxhash64(value))
    delta.replace(lake, contract, rows.filter(where).withColumns(encoded | keys), where, versions)
    return {"item versions": lake.rows(contract.name)}


def first_known(lake: Lake, version: int) -> DataFrame:
    """`item_ix`, the second `item_since` from which anything was known, and the keys known then.

    Counters are kept by an item's first attributes: what changes later does not move the past.
    """
    keys = contracts.item_key_columns(lake.spec)
    stored = delta.read(lake, contracts.item_versions(lake.spec), version)
    first = F.min_by(F.struct("valid_from", *keys), F.struct("valid_from", "day")).alias("first")
    since = F.floor(F.col("first.valid_from") / MICROS["s"]).alias("item_since")
    rows = stored.groupBy("item_ix").agg(first)
    return rows.select("item_ix", since, *[f"first.{name}" for name in keys])
