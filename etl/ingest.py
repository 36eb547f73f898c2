"""Raw logs of some days to clean events; what is bad is quarantined, what is unusable parked."""

import functools
import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from etl.arrival import Files, files_of_day, record_files
from etl.duplicates import first_copies
from etl.errors import UserError
from etl.parked import park, too_late
from etl.parse import parse_logs
from etl.quality import measure, read_by_day, refuse_bad_days, refuse_unused_columns
from etl.quarantine import NO_DAY, landed_within, quarantine
from etl.sources.places import BadFileError, naming_files, with_lines
from etl.spec.units import each_day
from etl.tables import contracts, delta
from etl.tables.lake import Lake
from etl.tables.schema import arrow_schema

Days = tuple[date, date]


def ingest(lake: Lake, raw: str, days: Days) -> dict[str, int]:
    """Replace the given days of `events`, `quarantine`, `parked` and `flow`; returns what flowed.

    Of a file that cannot be read to its end, what can be read is taken. Raises UserError before
    anything is written: where files are missing, a column that the spec names holds nothing, a
    day has no events or too many bad records, or days before these are missing.
    """
    _refuse_gap(lake, days)
    files = _files_by_day(lake, raw, days)
    damaged: list[str] = []
    while True:
        try:
            with naming_files():
                flow = _ingest(lake, raw, days, damaged)
            record_files(lake.root, files)
            return flow
        except BadFileError as error:
            if error.address in damaged:
                raise
            logging.warning("%s; what can be read of it is taken", error)
            damaged.append(error.address)


def _files_by_day(lake: Lake, raw: str, days: Days) -> dict[date, Files]:
    """The raw files of some days; none where Hadoop alone reads the raw folder."""
    try:
        return {day: files_of_day(lake.spec, raw, day) for day in each_day(*days)}
    except UserError as error:
        logging.warning("late files will not be noticed: %s", error)
        return {}


def _ingest(lake: Lake, raw: str, days: Days, damaged: Collection[str]) -> dict[str, int]:
    spec = lake.spec
    parsed = parse_logs(spec, raw, days, damaged).persist(StorageLevel.MEMORY_AND_DISK)
    inside = F.col("day").between(F.lit(days[0]), F.lit(days[1])) | F.col("day").isNull()
    try:
        groups = measure(spec, parsed.filter(inside))
        refuse_bad_days(spec, groups, raw, days)
        refuse_unused_columns(spec, groups, raw, days)
        bad = with_lines(parsed).filter(inside).filter("reasons != ''")
        good = parsed.filter(inside).filter("reasons = ''")
        read = {day or NO_DAY: n for day, n in read_by_day(groups).items()}
        with split(lake, good, days) as parts:
            flow = count_flow(read, parts, bad)
            quarantine(lake, spec.logs, bad, days)
            write_events(lake, parts, days)
        return write_flow(lake, flow, days)
    finally:
        parsed.unpersist()


@dataclass(frozen=True)
class Parts:
    """Clean events by what becomes of them.

    Of those on time the `fresh` are no copies; of the fresh and the late ones some are kept, the
    others parked. `inputs` are the versions of the tables in which copies were looked for.
    """

    on_time: DataFrame
    fresh: DataFrame
    kept: DataFrame
    parked: DataFrame
    inputs: Mapping[str, int]


@contextmanager
def split(lake: Lake, good: DataFrame, days: Days) -> Iterator[Parts]:
    """Clean events of some days by what becomes of them."""
    spec = lake.spec
    on_time, late = good.filter(~too_late(spec)), good.filter(too_late(spec))
    fresh, inputs = first_copies(lake, on_time, days)
    fresh = fresh.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        kept, parked = park(spec, fresh, late)
        kept = kept.withColumn("bucket", delta.bucket_of(F.col("user_id"), spec.buckets))
        yield Parts(on_time, fresh, kept, parked, inputs)
    finally:
        fresh.unpersist()


def write_events(lake: Lake, parts: Parts, days: Days) -> None:
    """Replace the days of `parked` and `events`."""
    where = delta.days_between(*days)
    delta.replace(lake, contracts.parked(lake.spec), parts.parked, where, {})
    delta.replace(lake, contracts.events(lake.spec), parts.kept, where, parts.inputs)


def rows_by_day(rows: DataFrame) -> dict[date, int]:
    """Rows of each landing day; those without one are under NO_DAY."""
    return _rows_by_day({"": rows})[""]


def _rows_by_day(parts: Mapping[str, DataFrame]) -> dict[str, dict[date, int]]:
    day = F.coalesce("day", F.lit(NO_DAY)).alias("day")
    named = [rows.select(F.lit(name).alias("part"), day) for name, rows in parts.items()]
    rows = functools.reduce(DataFrame.unionByName, named).groupBy("part", "day").count()
    counts: dict[str, dict[date, int]] = {name: {} for name in parts}
    for row in rows.collect():
        counts[row["part"]][row["day"]] = row["count"]
    return counts


def count_flow(read: Mapping[date, int], parts: Parts, bad: DataFrame) -> list[dict[str, Any]]:
    """Rows of `flow`; raises AssertionError where a record is not accounted for."""
    frames = {"on time": parts.on_time, "fresh": parts.fresh, "bad": bad}
    frames |= {"kept": parts.kept, "parked": parts.parked}
    counts, flow = _rows_by_day(frames), []
    for day, n in read.items():
        of_day = {name: by_day.get(day, 0) for name, by_day in counts.items()}
        row = {
            "kept": of_day["kept"],
            "quarantined": of_day["bad"],
            "duplicates": of_day["on time"] - of_day["fresh"],
            "parked": of_day["parked"],
        }
        assert n == sum(row.values()), f"{day}: {n} records were read, {row} accounted for"
        flow.append({"day": day, "read": n, **row})
    return flow


def _refuse_gap(lake: Lake, days: Days) -> None:
    """Raises UserError where days before these are missing, or later ones would not be rebuilt.

    Copies are looked for in the days before, and histories grow by them. Later days were made from
    what these days held.
    """
    refuse_older(lake, days)
    newest = lake.newest_day("events")
    if newest and newest + timedelta(days=1) < days[0]:
        first, last = newest + timedelta(days=1), days[0] - timedelta(days=1)
        raise UserError(f"{first} to {last} have not been ingested; ingest them before {days[0]}")


def refuse_older(lake: Lake, days: Days) -> None:
    """Raises UserError where later days have been ingested: they were made from these."""
    newest = lake.newest_day("events")
    if newest and days[1] < newest:
        raise UserError(
            f"{newest} has been ingested, and was made from what {days[0]} to {days[1]} held: run "
            f"the days up to it, --days {days[0]}:{newest}, in this step and those after it"
        )


def write_flow(lake: Lake, rows: list[dict[str, Any]], days: Days) -> dict[str, int]:
    """Replace the days of `flow`; returns the totals."""
    contract = contracts.flow(lake.spec)
    table = pa.Table.from_pylist(rows, arrow_schema(contract))
    frame = SparkSession.active().createDataFrame(table, contract.ddl)
    delta.replace(lake, contract, frame, landed_within(days), {})
    return {name: sum(row[name] for row in rows) for name in contract.columns if name != "day"}
