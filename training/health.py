"""Whether continuous learning is well: does GEM foretell the newest days as it did those before?

Measured are the prequential NE and the calibration of each objective, and how many impressions each
surface had. A measure is strange where it leaves what the days before had by more than their own
unrest (median, and median distance to it: one bad day among them changes little).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from statistics import median

import pyarrow.compute as pc

from etl.tables import arrow, contracts
from etl.tables.lake import Lake
from training.knowledge.foretold import Foretold, foretold, together

EARLIER = 14  # days that a day is compared with
FEWEST_DAYS = 4
FEWEST = 30  # outcomes of a day, below which a measure is noise
UNREST = 5.0  # so many median distances are no accident


@dataclass(frozen=True)
class Measure:
    """What is watched, by day, the newest last.

    A share of `least` may always be gone or gained. `only_more`: less is no cause for alarm;
    `stops`: an alarm is a reason to promote nothing that was learned from this GEM.
    """

    name: str
    days: tuple[date, ...]
    values: tuple[float, ...]
    least: float
    only_more: bool = False
    stops: bool = False

    @property
    def alarm(self) -> str | None:
        """What is strange of the newest value, if anything is."""
        *before, now = self.values[-EARLIER - 1 :]
        if len(before) < FEWEST_DAYS:
            return None
        usual = median(before)
        room = max(self.least * usual, UNREST * median(abs(value - usual) for value in before))
        off = now - usual if self.only_more else abs(now - usual)
        return (
            f"{self.name} is {now:.3g} on {self.days[-1]}, usually {usual:.3g}"
            if off > room
            else None
        )


def measures(lake: Lake, landed: date) -> list[Measure]:
    """All that is watched, of the days up to the one that has landed."""
    told = [one for one in foretold(lake, landed) if one.happened >= FEWEST]
    return [*_predictions(lake, told), *_volumes(lake, landed)]


def _predictions(lake: Lake, told: Sequence[Foretold]) -> Iterator[Measure]:
    for name in lake.spec.objectives:
        days = tuple(sorted({one.day for one in told if one.objective == name}))
        together = [_of_all(told, name, day) for day in days]
        ne, ratio = (tuple(getattr(f, what) for f in together) for what in ("ne", "ratio"))
        if days:
            yield Measure(f"NE of {name}", days, ne, 0.1, only_more=True, stops=True)
            yield Measure(f"calibration of {name}", days, ratio, 0.2, stops=True)


def _of_all(told: Sequence[Foretold], objective: str, day: date) -> Foretold:
    return together([one for one in told if (one.objective, one.day) == (objective, day)])


def _volumes(lake: Lake, landed: date) -> Iterator[Measure]:
    shown = arrow.snapshot(lake, contracts.impressions(lake.spec))
    days = tuple(day for day in shown.days() if day <= landed)[-EARLIER - 1 :]
    counts = [_by_surface(shown, day) for day in days]
    for name, code in lake.spec.surface_codes.items():
        values = tuple(float(counted.get(code, 0)) for counted in counts)
        if any(values):
            yield Measure(f"impressions on {name}", days, values, 0.5)


def _by_surface(shown: arrow.Snapshot, day: date) -> dict[int, int]:
    counted = pc.value_counts(shown.read(["surface"], day=day)["surface"]).to_pylist()
    return {row["values"]: row["counts"] for row in counted}
