"""The quarantine table: invalid records with their payload and reasons, and a report of them."""

from collections import defaultdict
from collections.abc import Collection
from datetime import date

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from rich.console import Console
from rich.table import Table
from rich.text import Text

from etl.ingest.normalize import REASON_SEPARATOR
from etl.tables import schemas, spark_io
from etl.tables.arrow import snapshot
from etl.tables.lake import Lake

UNKNOWN_DAY = date(1970, 1, 1)  # partition of records without a landing day
MAX_PAYLOAD_CHARS = 300  # shown in the report


def write_quarantine(
    lake: Lake, logs: Collection[str], invalid: DataFrame, days: tuple[date, date]
) -> None:
    """Replace the quarantined records of some sources on a range of days.

    Args:
        lake: The lake to write to.
        logs: Names of the sources whose records are replaced.
        invalid: Records whose `reasons` are joined by `REASON_SEPARATOR`.
        days: First and last landing day; records without one are replaced, too.
    """
    rows = invalid.withColumn("reasons", F.array_distinct(F.split("reasons", REASON_SEPARATOR)))
    rows = rows.withColumn("day", F.coalesce("day", F.lit(UNKNOWN_DAY)))
    names = ", ".join(f"'{name}'" for name in logs)
    where = f"({landing_day_predicate(days)}) AND log IN ({names})"
    spark_io.replace_partitions(lake, schemas.quarantine(lake.spec), rows, where, {})


def landing_day_predicate(days: tuple[date, date]) -> str:
    """SQL for a range of landing days plus `UNKNOWN_DAY`, which every run replaces."""
    return f"{spark_io.day_range_predicate(*days)} OR day = '{UNKNOWN_DAY}'"


def quarantine_report(
    lake: Lake, days: tuple[date, date], num_examples: int, console: Console
) -> None:
    """Print the reasons, the most frequent first, with counts, days, files and examples."""
    table = snapshot(lake, schemas.quarantine(lake.spec))
    in_range = [day for day in table.days() if days[0] <= day <= days[1] or day == UNKNOWN_DAY]
    by_reason: dict[str, list[dict[str, object]]] = defaultdict(list)
    for row in table.read(day=in_range).to_pylist():
        for reason in row["reasons"]:
            by_reason[reason].append(row)
    most_frequent = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    summary = Table("reason", "records", "days", "files", title=f"quarantine of {lake.root}")
    for reason, rows in most_frequent:
        files = len({row["source_file"] for row in rows})
        summary.add_row(Text(reason), f"{len(rows):,}", _format_days(rows), f"{files:,}")
    console.print(summary)
    for reason, rows in most_frequent:
        console.print(Text(f"\n{reason}", style="bold"))
        for row in rows[:num_examples]:
            _print_record(row, console)


def _format_days(rows: list[dict[str, object]]) -> str:
    days = sorted({"unknown" if row["day"] == UNKNOWN_DAY else str(row["day"]) for row in rows})
    return days[0] if len(days) == 1 else f"{days[0]} … {days[-1]}"


def _print_record(row: dict[str, object], console: Console) -> None:
    line = f":{row['line']}" if row["line"] else ""
    payload = str(row["payload"] or "(the whole file)")
    console.print(Text(f"  {row['source_file']}{line}"), soft_wrap=True)
    console.print(Text(f"    {payload[:MAX_PAYLOAD_CHARS]}"))
