"""Raw records of a log to events with all that is wrong with them."""

import functools
from collections.abc import Collection
from datetime import date

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from etl.clock import day_start
from etl.sources.canonical import canonical, needed_columns, raw_columns
from etl.sources.raw import DAY, PAYLOAD, PLACE, read_raw
from etl.spec.model import DataSpec
from etl.spec.units import MICROS
from etl.tables import contracts


def parse_logs(
    spec: DataSpec, raw: str, days: tuple[date, date], damaged: Collection[str] = ()
) -> DataFrame:
    """All records in the files of some days; see `parse` and `read_raw`."""
    parsed = [parse_log(spec, name, raw, days, damaged) for name in spec.logs]
    return functools.reduce(DataFrame.unionByName, parsed)


def parse_log(
    spec: DataSpec,
    name: str,
    raw: str,
    days: tuple[date, date],
    damaged: Collection[str] = (),
) -> DataFrame:
    """The records of one log in the files of some days."""
    log = spec.logs[name]
    columns, needed = raw_columns(spec, log), needed_columns(log)
    return parse(spec, name, read_raw(raw, log, columns, days, needed, damaged), PLACE)


def parse(spec: DataSpec, log: str, rows: DataFrame, place: str) -> DataFrame:
    """Raw rows of a log as events (but `bucket`), with `reasons`, payload, `log`, and `place`."""
    source = spec.logs[log]
    rows = canonical(spec, source, rows)
    rows = rows.withColumns({"day": F.coalesce("day", DAY), "log": F.lit(log)})
    rows = rows.withColumn("visible_ts", visible_ts(spec, source.delay))
    columns = [name for name in contracts.events(spec).columns if name != "bucket"]
    return rows.select(*columns, "reasons", "named", PAYLOAD, place)


def visible_ts(spec: DataSpec, delay: int) -> Column:
    """When an event could first be seen, in whole seconds (design: the as-of rule).

    Never before the start of the day on which it landed: histories grow day by day.
    """
    seconds = [F.floor(F.col(name) / MICROS["s"]) for name in ("event_ts", "ingest_ts")]
    return F.greatest(seconds[0], seconds[1] + F.lit(delay), F.expr(day_start(spec)))
