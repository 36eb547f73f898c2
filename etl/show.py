"""What is in quarantine, for people: by reason, with examples."""

from collections import defaultdict
from datetime import date

from rich.console import Console
from rich.table import Table
from rich.text import Text

from etl.quarantine import NO_DAY
from etl.tables import contracts
from etl.tables.arrow import snapshot
from etl.tables.lake import Lake

WIDEST = 300  # characters of a payload


def show(lake: Lake, days: tuple[date, date], examples: int, console: Console) -> None:
    """Print each reason with its records, days and files, the most frequent first."""
    found = snapshot(lake, contracts.quarantine(lake.spec))
    within = [day for day in found.days() if days[0] <= day <= days[1] or day == NO_DAY]
    by_reason: dict[str, list[dict[str, object]]] = defaultdict(list)
    for row in found.read(day=within).to_pylist():
        for reason in row["reasons"]:
            by_reason[reason].append(row)
    table = Table("reason", "records", "days", "files", title=f"quarantine of {lake.root}")
    ordered = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    for reason, rows in ordered:
        told = sorted({"unknown" if row["day"] == NO_DAY else str(row["day"]) for row in rows})
        span = told[0] if len(told) == 1 else f"{told[0]} … {told[-1]}"
        files = len({row["source_file"] for row in rows})
        table.add_row(Text(reason), f"{len(rows):,}", span, f"{files:,}")
    console.print(table)
    for reason, rows in ordered:
        console.print(Text(f"\n{reason}", style="bold"))
        for row in rows[:examples]:
            line = f":{row['line']}" if row["line"] else ""
            console.print(Text(f"  {row['source_file']}{line}"), soft_wrap=True)
            console.print(Text(f"    {str(row['payload'] or '(a whole file)')[:WIDEST]}"))
