"""Logged requests asked live: what is read beside what the tables say."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.result import Result

if TYPE_CHECKING:
    from benchmarks.serving import ServingArgs


def measure(args: "ServingArgs", result: Result) -> None:
    """Differences in the requests of a day, as its ranker reads them."""
    from ranking.online.compare import compare
    from ranking.package.manifest import read
    from ranking.package.versions import answering

    lake = args.open_lake()
    told = read(answering(lake.root, args.surface))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "store")
        found = compare(lake, args.day, told.sequence, told.reads, folder, args.requests)
    apart = f"{len(found.differences)} differences"
    result.rows.append(("live against tables", apart, f"{found.requests:,} requests", "0"))
    result.take("online_offline_differences", len(found.differences), "")
    result.figures["online_offline_requests"] = found.requests
