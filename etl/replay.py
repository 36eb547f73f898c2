"""Quarantined records read again, after the spec or the code was mended."""

import functools
from collections import Counter
from datetime import date

from pyspark import StorageLevel
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from etl.errors import UserError
from etl.ingest import replace_days, write_flow
from etl.parse import parse
from etl.quarantine import NO_DAY, landed_within
from etl.sources.canonical import SEPARATOR, raw_columns
from etl.sources.raw import DAY, FAULT, PAYLOAD, from_payload
from etl.spec.model import DataSpec
from etl.tables import contracts, delta
from etl.tables.arrow import snapshot
from etl.tables.lake import Lake

Days = tuple[date, date]


def replay(lake: Lake, days: Days) -> dict[str, int]:
    """Let in what is quarantined on some days and clean now; the rest has its reasons anew.

    A record lands on the day on which it did: what was made of that day has to be made again.
    Files that could not be read stay: fetch them again, and ingest their day. Raises UserError
    where nothing is quarantined on these days.
    """
    held = delta.read(lake, contracts.quarantine(lake.spec)).filter(landed_within(days))
    held = held.filter(F.col("log").isin(list(lake.spec.logs)))
    read = _parsed_again(lake.spec, held, days).persist(StorageLevel.MEMORY_AND_DISK)
    try:
        before = Counter(
            {row["day"]: row["count"] for row in held.groupBy("day").count().collect()}
        )
        if not before:
            raise UserError(f"nothing of {days[0]} to {days[1]} is in quarantine in {lake.root}")
        after = Counter({row["day"]: row["count"] for row in read.groupBy("day").count().collect()})
        there = _kept(lake, days)
        mended = read.filter("reasons = ''").select(there.columns)
        bad = read.filter("reasons != ''")
        repeated = replace_days(lake, there.unionByName(mended), bad, days)
        flow = snapshot(lake, contracts.flow(lake.spec)).read().to_pylist()
        rows = {d["day"]: d for d in flow if days[0] <= d["day"] <= days[1] or d["day"] == NO_DAY}
        read_on = {day: row["read"] - before[day] + after[day] for day, row in rows.items()}
        again = {day: row["duplicates"] + repeated.get(day, 0) for day, row in rows.items()}
        write_flow(lake, read_on, again, days)
        still = bad.count()
        return {"let in": before.total() - still, "still bad": still}
    finally:
        read.unpersist()


def _parsed_again(spec: DataSpec, held: DataFrame, days: Days) -> DataFrame:
    """Quarantined records as `parse` gives them; of a whole file the reasons stay."""
    parts = []
    for name, log in spec.logs.items():
        rows = held.filter(F.col("log") == name).withColumn(DAY, F.nullif("day", F.lit(NO_DAY)))
        rows = from_payload(rows.drop("day", "log"), sorted(set(raw_columns(spec, log))))
        stays = F.when(F.col(PAYLOAD).isNull(), F.concat_ws(SEPARATOR, "reasons"))
        rows = rows.withColumn(FAULT, F.coalesce(stays, FAULT)).drop("reasons")
        parts.append(parse(spec, name, rows, "line"))
    whole = functools.reduce(DataFrame.unionByName, parts)
    elsewhere = (F.col("reasons") == "") & ~F.col("day").between(*map(F.lit, days))
    whole = whole.withColumn("day", F.when(elsewhere, F.lit(NO_DAY)).otherwise(F.col("day")))
    other = F.lit("of a day that was not replayed")
    whole = whole.withColumn("reasons", F.when(elsewhere, other).otherwise(F.col("reasons")))
    return whole.withColumn("day", F.coalesce("day", F.lit(NO_DAY)))


def _kept(lake: Lake, days: Days) -> DataFrame:
    """What was found clean on some days, used or parked, but `bucket`."""
    found = []
    for contract in (contracts.events(lake.spec), contracts.parked(lake.spec)):
        rows = delta.read(lake, contract).filter(delta.days_between(*days))
        found.append(rows.drop("bucket", "reason"))
    return functools.reduce(DataFrame.unionByName, found)
