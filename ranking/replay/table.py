"""A ranker's order of logged requests beside the log's own."""

from datetime import date

from rich.table import Table

from etl.tables.lake import Lake
from ranking.package.ranker import load
from ranking.package.versions import answering, identified
from ranking.replay.estimate import estimate
from ranking.replay.logged import logged
from ranking.replay.ndcg import ndcg
from ranking.replay.scored import scored
from training.loop.paired import Interval


def replayed(lake: Lake, surface: str, days: tuple[date, date], landed: date) -> Table:
    """What the ranker that answers would have brought a request, beside what the log brought.

    Raises UserError where no ranker is promoted, or the log does not tell propensities.
    """
    ranker = identified(load(answering(lake.root, surface)), lake.root, surface)
    found = logged(lake, days, scored(lake, ranker, days, landed))
    rows, places = found.scored, (found.places, found.other)
    title = (
        f"{len(set(rows.request.tolist())):,} requests of {surface}, {found.left_out:,} left out"
    )
    table = Table("a request", "as logged", f"in the order of {ranker.manifest.version}",
                  "difference [95 %]", "NDCG logged", "NDCG", title=title)  # fmt: skip
    served = [name for name in ranker.objectives if surface in lake.spec.surfaces_of(name)]
    gains = {name: rows.labels[:, ranker.objectives.index(name)] for name in served}
    for name, gain in (gains | {"paid at the bid": rows.paid}).items():
        said = estimate(gain, *places, found.chances, rows.request, rows.user)
        stands = [f"{ndcg(gain, place, rows.request):.3f}" for place in places]
        table.add_row(name, told(said.logged), told(said.other), told(said.apart), *stands)
    return table


def told(found: Interval) -> str:
    """A number and its bounds."""
    return f"{found.value:.5f} [{found.low:.5f}, {found.high:.5f}]"
