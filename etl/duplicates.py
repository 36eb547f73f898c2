"""One copy of each event: the one that was ingested first."""

from datetime import date, timedelta

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from etl.spec.model import DataSpec
from etl.tables import contracts, delta
from etl.tables.lake import Lake


def first_copies(
    lake: Lake, events: DataFrame, days: tuple[date, date]
) -> tuple[DataFrame, dict[str, int]]:
    """Events of `days` of which no copy was ingested before, and the table versions read.

    Copies have one event id in one log (in any with `shared_event_ids`), or are impressions of one
    impression id. Those that landed up to `lateness` before are looked up: older ones cannot be, as
    the later copy would have been too late.
    """
    events = events.withColumn("identity", _identity(lake.spec))
    tie = F.xxhash64(
        *[F.col(name) for name in contracts.parked(lake.spec).columns if name != "reason"]
    )
    order = Window.partitionBy("identity").orderBy("day", "ingest_ts", tie)
    fresh = events.withColumn("copy", F.row_number().over(order)).filter("copy = 1").drop("copy")
    before = days[0] - timedelta(days=1)
    since = days[0] - timedelta(days=lake.spec.lateness_days + 1)
    versions = {}
    for contract in (contracts.events(lake.spec), contracts.parked(lake.spec)):
        if lake.exists(contract.name):
            versions[contract.name] = lake.version(contract.name)
            rows = delta.read(lake, contract, versions[contract.name])
            landed = rows.filter(delta.days_between(since, before))
            known = landed.select(_identity(lake.spec).alias("identity"))
            fresh = fresh.join(known, "identity", "left_anti")
    return fresh.drop("identity"), versions


def _identity(spec: DataSpec) -> Column:
    """What only copies of one event share; examples are one an impression id."""
    shown = F.col("type") == spec.event_codes[spec.impression]
    own = F.col("event_id") if spec.shared_event_ids else F.concat_ws("\x1f", "log", "event_id")
    return F.when(shown, F.concat(F.lit("shown "), "impression_id")).otherwise(own)
