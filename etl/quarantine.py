"""Bad records: kept as they were read, with all that is wrong, until a fix lets them in."""

from collections.abc import Collection
from datetime import date

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from etl.sources.canonical import SEPARATOR
from etl.tables import contracts, delta
from etl.tables.lake import Lake

NO_DAY = date(1970, 1, 1)  # of records that tell no day, in files whose path tells none


def quarantine(lake: Lake, logs: Collection[str], bad: DataFrame, days: tuple[date, date]) -> None:
    """Replace what some logs have in quarantine on some days; `reasons` are cut by SEPARATOR."""
    rows = bad.withColumn("reasons", F.array_distinct(F.split("reasons", SEPARATOR)))
    rows = rows.withColumn("day", F.coalesce("day", F.lit(NO_DAY)))
    names = ", ".join(f"'{name}'" for name in logs)
    where = f"({landed_within(days)}) AND log IN ({names})"
    delta.replace(lake, contracts.quarantine(lake.spec), rows, where, {})


def landed_within(days: tuple[date, date]) -> str:
    """A predicate on days; records without one stay one partition, read again with each run."""
    return f"{delta.days_between(*days)} OR day = '{NO_DAY}'"
