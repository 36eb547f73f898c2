"""Raw logs of some days to clean events; what is bad is quarantined, what is unusable parked."""

import logging
from collections.abc import Collection, Mapping
from datetime import date, timedelta
from typing import Any

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from etl.duplicates import first_copies
from etl.errors import UserError
from etl.parked import park, too_late
from etl.parse import parse_logs
from etl.quality import measure, refuse_bad_days, refuse_unused_columns
from etl.quarantine import NO_DAY, landed_within, quarantine
from etl.sources.places import BadFileError, naming_files, with_lines
from etl.tables import contracts, delta
from etl.tables.lake import Lake

Days = tuple[date, date]


def ingest(lake: Lake, raw: str, days: Days) -> dict[str, int]:
    """Replace the given days of `events`, `quarantine`, `parked` and `flow`; returns what flowed.

    Of a file that cannot be read to its end, what can be read is taken. Raises UserError before
    anything is written: where files are missing, a column that the spec names holds nothing, a
    day has no events or too many bad records, or days before these are missing.
    """
    _refuse_gap(lake, days)
    damaged: list[str] = []
    while True:
        try:
            with naming_files():
                return _ingest(lake, raw, days, damaged)
        except BadFileError as error:
            if error.address in damaged:
                raise
            logging.warning("%s; what can be read of it is taken", error)
            damaged.append(error.address)


def _ingest(lake: Lake, raw: str, days: Days, damaged: Collection[str]) -> dict[str, int]:
    spec = lake.spec
    parsed = parse_logs(spec, raw, days, damaged).persist(StorageLevel.MEMORY_AND_DISK)
    inside = F.col("day").between(F.lit(days[0]), F.lit(days[1])) | F.col("day").isNull()
    try:
        counts = measure(spec, parsed.filter(inside))
        refuse_bad_days(spec, counts, raw, days)
        refuse_unused_columns(spec, counts, raw)
        bad = with_lines(parsed).filter(inside).filter("reasons != ''")
        good = parsed.filter(inside).filter("reasons = ''")
        repeated = replace_days(lake, good, bad, days)
        return write_flow(lake, counts.read, repeated, days)
    finally:
        parsed.unpersist()


def replace_days(lake: Lake, good: DataFrame, bad: DataFrame, days: Days) -> dict[date, int]:
    """Write events, copies and unusable ones apart, and bad records; returns copies by day."""
    spec, where = lake.spec, delta.days_between(*days)
    on_time, late = good.filter(~too_late(spec)), good.filter(too_late(spec))
    fresh, inputs = first_copies(lake, on_time, days)
    fresh = fresh.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        kept, parked = park(spec, fresh, late)
        kept = kept.withColumn("bucket", delta.bucket_of(F.col("user_id"), spec.buckets))
        quarantine(lake, spec.logs, bad, days)
        delta.replace(lake, contracts.parked(spec), parked, where, {})
        delta.replace(lake, contracts.events(spec), kept, where, inputs)
        came, stayed = _by_day(on_time), _by_day(fresh)
        return {day: n - stayed.get(day, 0) for day, n in came.items()}
    finally:
        fresh.unpersist()


def _by_day(rows: DataFrame) -> dict[date, int]:
    return {row["day"]: row["count"] for row in rows.groupBy("day").count().collect()}


def _refuse_gap(lake: Lake, days: Days) -> None:
    """Copies are looked for in the days before, and histories grow by them: none may be missing."""
    newest = lake.newest_day("events") if lake.exists("events") else None
    if newest and newest + timedelta(days=1) < days[0]:
        first, last = newest + timedelta(days=1), days[0] - timedelta(days=1)
        raise UserError(f"{first} to {last} have not been ingested; ingest them before {days[0]}")


def write_flow(
    lake: Lake, read: Mapping[date | None, int], repeated: dict[date, int], days: Days
) -> dict[str, int]:
    """Replace the days of `flow`, by what the tables say that they hold; returns the totals."""
    rows = [
        _flow(lake, day or NO_DAY, n, repeated.get(day or NO_DAY, 0)) for day, n in read.items()
    ]
    contract = contracts.flow(lake.spec)
    table = pa.Table.from_pylist(rows).select(list(contract.columns))
    frame = SparkSession.active().createDataFrame(table, contract.ddl)
    delta.replace(lake, contract, frame, landed_within(days), {})
    return {name: sum(row[name] for row in rows) for name in contract.columns if name != "day"}


def _flow(lake: Lake, day: date, read: int, duplicates: int) -> dict[str, Any]:
    span = (day, day)
    counts = {
        "kept": lake.rows("events", span),
        "quarantined": sum(lake.rows("quarantine", span, log=log) for log in lake.spec.logs),
        "duplicates": duplicates,
        "parked": lake.rows("parked", span),
    }
    assert read == sum(counts.values()), f"{day}: {read} records were read, {counts} accounted for"
    return {"day": day, "read": read, **counts}


if __name__ == "__main__":
    import sys

    from etl.cli import run
    from etl.commands import ingest as command

    sys.exit(run(command, sys.argv[1:], "etl/ingest.py"))
