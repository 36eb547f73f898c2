"""Quarantined records read again, after the spec or the code was mended."""

import functools
from collections.abc import Mapping
from datetime import date
from typing import Any

from pyspark import StorageLevel
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from etl.errors import UserError
from etl.ingest import refuse_older, rows_by_day, split, write_events, write_flow
from etl.parse import parse
from etl.quarantine import NO_DAY, landed_within, quarantine
from etl.sources.canonical import SEPARATOR, raw_columns
from etl.sources.raw import DAY, FAULT, PAYLOAD, from_payload
from etl.spec.model import DataSpec
from etl.tables import contracts, delta
from etl.tables.arrow import snapshot
from etl.tables.lake import Lake

Days = tuple[date, date]
TABLES = {"kept": "events", "parked": "parked"}


def replay(lake: Lake, days: Days) -> dict[str, int]:
    """Let in what is quarantined on some days and clean now; the rest has its reasons anew.

    A record lands on the day on which it did: what was made of that day has to be made again.
    Files that could not be read stay: fetch them again, and ingest their day. A record leaves
    quarantine after it is among the events, so a replay that was interrupted can be run again.
    Raises UserError where nothing is quarantined on these days, or later days would keep copies of
    what is let in.
    """
    refuse_older(lake, days)
    held = delta.read(lake, contracts.quarantine(lake.spec)).filter(landed_within(days))
    held = held.filter(F.col("log").isin(list(lake.spec.logs)))
    read = _parsed_again(lake.spec, held, days).persist(StorageLevel.MEMORY_AND_DISK)
    try:
        before, after, clean = rows_by_day(held), rows_by_day(read), _clean(lake, days)
        mended = read.filter("reasons = ''").select(clean.columns)
        bad = read.filter("reasons != ''")
        with split(lake, clean.unionByName(mended), days) as parts:
            write_events(lake, parts, days)
        quarantine(lake, lake.spec.logs, bad, days)
        write_flow(lake, _flow(lake, days, before, after), days)
        if not before:
            raise UserError(f"nothing of {days[0]} to {days[1]} is in quarantine in {lake.root}")
        still = bad.count()
        return {"let in": sum(before.values()) - still, "still bad": still}
    finally:
        read.unpersist()


def _flow(
    lake: Lake, days: Days, before: Mapping[date, int], after: Mapping[date, int]
) -> list[dict[str, Any]]:
    """What became of the records of some days, as the tables have it now.

    `before` and `after` count those read again by the day on which they were, and are. Where a
    replay was interrupted after they had moved, the tables hold more than was counted.
    """
    rows = []
    for row in snapshot(lake, contracts.flow(lake.spec)).read().to_pylist():
        day = row["day"]
        if not (days[0] <= day <= days[1] or day == NO_DAY):
            continue
        counts = {name: lake.rows(table, (day, day)) for name, table in TABLES.items()}
        logs = lake.spec.logs
        counts["quarantined"] = sum(lake.rows("quarantine", (day, day), log=log) for log in logs)
        read = row["read"] - before.get(day, 0) + after.get(day, 0)
        read = max(read, sum(counts.values()) + row["duplicates"])
        rows.append({"day": day, "read": read, **counts, "duplicates": read - sum(counts.values())})
    return rows


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


def _clean(lake: Lake, days: Days) -> DataFrame:
    """What was found clean on some days, used or parked, but `bucket`."""
    found = []
    for contract in (contracts.events(lake.spec), contracts.parked(lake.spec)):
        rows = delta.read(lake, contract).filter(delta.days_between(*days))
        found.append(rows.drop("bucket", "reason"))
    return functools.reduce(DataFrame.unionByName, found)
