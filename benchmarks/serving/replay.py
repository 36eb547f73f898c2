"""Logged requests asked live: what is read beside what the tables say."""

import tempfile
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.result import Result
from benchmarks.serving.workload import ServingArgs
from etl.tables.lake import Lake

if TYPE_CHECKING:
    from ranking.online.compare import Compared
    from ranking.reads import Reads


def measure(args: ServingArgs, result: Result) -> None:
    """Differences in the requests of a day, and of those before it until they are enough."""
    from ranking.package.manifest import read
    from ranking.package.versions import answering

    lake = args.open_lake()
    told = read(answering(lake.root, args.surface))
    found = list(_by_day(lake, args.day, told.sequence, told.reads, args.requests))
    apart = sum(len(compared.differences) for compared in found)
    requests = sum(compared.requests for compared in found)
    days = f"{requests:,} requests of {len(found)} days"
    result.rows.append(("live against tables", f"{apart} differences", days, "0"))
    nothing = f"no request before {args.day} or on it has a day before it"
    result.take("online_offline_differences", apart if requests else None, nothing)
    result.figures["online_offline_requests"] = requests


def _by_day(
    lake: Lake, day: date, sequence: str, reads: "Reads", wanted: int
) -> Iterator["Compared"]:
    """Each day of its own: a store that ends with the eve is told the day's events."""
    from ranking.online.compare import compare

    first, _ = lake.days("examples")
    while wanted > 0 and day > first:
        with tempfile.TemporaryDirectory() as place:
            compared = compare(lake, day, sequence, reads, Path(place, "store"), wanted)
        yield compared
        wanted -= compared.requests
        day -= timedelta(days=1)
