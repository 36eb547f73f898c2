"""Raw logs of some days to clean events and quarantine."""

from datetime import date, timedelta

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from etl.duplicates import first_copies
from etl.errors import UserError
from etl.sources.canonical import SEPARATOR, canonical, raw_columns
from etl.sources.raw import DAY as FOLDER_DAY
from etl.sources.raw import PAYLOAD, read_raw, readable
from etl.spec.model import DataSpec
from etl.spec.sources import EventLog, ImpressionLog
from etl.spec.units import DAY, MICROS, each_day
from etl.tables import contracts, delta
from etl.tables.lake import Lake

NO_DAY = "1970-01-01"  # of records that tell no day, in files whose path tells none


def ingest(lake: Lake, raw: str, days: tuple[date, date]) -> dict[str, int]:
    """Replace the given days of `events`, `quarantine` and `flow`; returns what flowed.

    Raises UserError before anything is written: where files are missing or unreadable, a column
    that the spec names holds nothing, a day has no events, or days before these are missing.
    """
    spec = lake.spec
    _refuse_gap(lake, days)
    with readable():
        parsed = _parse_all(spec, raw, days).persist(StorageLevel.MEMORY_AND_DISK)
        try:
            _refuse_empty(spec, parsed, raw, days)
            return _write(lake, parsed, days)
        finally:
            parsed.unpersist()


def _write(lake: Lake, parsed: DataFrame, days: tuple[date, date]) -> dict[str, int]:
    spec, where = lake.spec, delta.days_between(*days)
    bad = parsed.filter("reasons != ''")
    bad = bad.withColumn("reasons", F.array_distinct(F.split("reasons", SEPARATOR)))
    bad = bad.withColumn("day", landed_on())
    good = parsed.filter("reasons = ''")
    good = good.withColumn("visible_ts", visible_ts(spec))
    good = good.withColumn("bucket", delta.bucket_of(F.col("user_id"), spec.buckets))
    fresh, inputs = first_copies(lake, good, days)
    delta.replace(lake, contracts.quarantine(spec), bad, _landed_within(days), {})
    delta.replace(lake, contracts.events(spec), fresh, where, inputs)
    return _write_flow(lake, parsed, days)


def landed_on() -> Column:
    """The day of a record: its own, else that of its file, else `NO_DAY`.

    A file without a day is read again with each run: its records without one stay one partition.
    """
    return F.coalesce("day", FOLDER_DAY, F.lit(NO_DAY).cast("date"))


def _landed_within(days: tuple[date, date]) -> str:
    return f"{delta.days_between(*days)} OR day = '{NO_DAY}'"


def _parse_all(spec: DataSpec, raw: str, days: tuple[date, date]) -> DataFrame:
    logs = [_parse(spec, log, raw, days) for log in spec.logs.values()]
    whole = logs[0]
    for log in logs[1:]:
        whole = whole.unionByName(log)
    return whole


def _parse(
    spec: DataSpec, log: EventLog | ImpressionLog, raw: str, days: tuple[date, date]
) -> DataFrame:
    rows = canonical(spec, log, read_raw(raw, log, raw_columns(spec, log), days))
    rows = rows.withColumn("delay", F.lit(log.delay))
    names = [n for n in contracts.events(spec).columns if n not in {"visible_ts", "bucket"}]
    inside = F.col("day").between(F.lit(days[0]), F.lit(days[1])) | F.col("day").isNull()
    return rows.filter(inside).select(*names, "delay", "reasons", "named", PAYLOAD, FOLDER_DAY)


def visible_ts(spec: DataSpec) -> Column:
    """When an event could first be seen, in whole seconds (design: the as-of rule).

    Never before the start of the day on which it landed: histories grow day by day.
    """
    landed = F.unix_date("day").cast("bigint") * DAY - spec.utc_offset_hours * 3600
    seconds = [F.floor(F.col(name) / MICROS["s"]) for name in ("event_ts", "ingest_ts")]
    return F.greatest(seconds[0], seconds[1] + F.col("delay"), landed)


def _refuse_gap(lake: Lake, days: tuple[date, date]) -> None:
    """Copies are looked for in the days before, and histories grow by them: none may be missing."""
    newest = lake.newest_day("events") if lake.exists("events") else None
    if newest and newest + timedelta(days=1) < days[0]:
        first, last = newest + timedelta(days=1), days[0] - timedelta(days=1)
        raise UserError(f"{first} to {last} have not been ingested; ingest them before {days[0]}")


def _refuse_empty(spec: DataSpec, parsed: DataFrame, raw: str, days: tuple[date, date]) -> None:
    good = parsed.filter("reasons = ''")
    optional = _optional_columns(spec)
    counted = good.groupBy("day").agg(
        F.count("*").alias("n"), *[F.count(n).alias(n) for n in optional]
    )
    rows = {row["day"]: row for row in counted.collect()}
    empty = [str(day) for day in each_day(*days) if day not in rows]
    if empty:
        held = (
            parsed.select(F.explode(F.split("reasons", SEPARATOR)).alias("r"))
            .filter("r != ''")
            .groupBy("r")
            .count()
            .collect()
        )
        why = "; ".join(f"{row['r']}: {row['count']}" for row in held)
        detail = f" (quarantined: {why})" if why else ""
        raise UserError(f"no events of {', '.join(empty)} in {raw}{detail}; check --days")
    for name, column in optional.items():
        if not sum(row[name] for row in rows.values()):
            raise UserError(
                f"the spec names column {column}, but no record of {raw} has it; "
                "correct the spec, or take the column out"
            )


def _optional_columns(spec: DataSpec) -> dict[str, str]:
    """Raw columns that impressions hold where a spec names them, by what they become.

    Dwell and value belong to some types of events only: a day may well have none of those.
    """
    found = {f"x_{n}": a.column or n for n, a in contracts.context_columns(spec).items()}
    for log in spec.logs.values():
        c = log.columns
        own = {"request_id": c.request, "position": c.position}
        own |= {"propensity": c.propensity, "named": c.impression}
        found |= {name: column for name, column in own.items() if column}
    return found


def _write_flow(lake: Lake, parsed: DataFrame, days: tuple[date, date]) -> dict[str, int]:
    """Replace the days of `flow`; returns the totals."""
    good = F.col("reasons") == ""
    counts = parsed.groupBy(landed_on().alias("day")).agg(
        F.count("*").alias("read"), F.count_if(good).alias("good")
    )
    rows = [
        {
            "day": row["day"],
            "read": row["read"],
            "kept": (kept := lake.rows("events", (row["day"], row["day"]))),
            "quarantined": row["read"] - row["good"],
            "duplicates": row["good"] - kept,
        }
        for row in counts.collect()
    ]
    contract = contracts.flow(lake.spec)
    frame = SparkSession.active().createDataFrame(rows, contract.ddl)
    delta.replace(lake, contract, frame, _landed_within(days), {})
    return {name: sum(row[name] for row in rows) for name in contract.columns if name != "day"}


if __name__ == "__main__":
    import sys

    from etl.cli import run
    from etl.commands import ingest as command

    sys.exit(run(command, sys.argv[1:], "etl/ingest.py"))
