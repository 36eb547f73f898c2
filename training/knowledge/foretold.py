"""What GEM said of each day before it learned anything of it, over what happened.

The prequential NE of a day is the health of continuous learning: every row is predicted once, by
the GEM of the days before, so that no day is held out.
"""

from collections.abc import Iterator, Sequence
from datetime import date
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from etl.spec.units import MICROS
from etl.tables import arrow, contracts
from etl.tables.arrow import Snapshot
from etl.tables.lake import Lake

Floats = npt.NDArray[np.float64]


class Foretold(NamedTuple):
    """Of a surface and an objective on a day: rows, outcomes, what was said; logloss in nats."""

    day: date
    surface: str
    objective: str
    rows: int
    happened: float
    said: float
    logloss: float

    @property
    def ratio(self) -> float:
        """Predictions over outcomes."""
        return self.said / self.happened

    @property
    def ne(self) -> float:
        """Logloss over that of the day's own base rate."""
        p = self.happened / self.rows
        return self.logloss / (-self.rows * (p * np.log(p) + (1 - p) * np.log1p(-p)))


def together(parts: Sequence[Foretold]) -> Foretold:
    """All parts as one, under the name of the first."""
    one = parts[0]
    return one._replace(
        rows=sum(part.rows for part in parts),
        happened=sum(part.happened for part in parts),
        said=sum(part.said for part in parts),
        logloss=sum(part.logloss for part in parts),
    )


def foretold(lake: Lake, landed: date) -> list[Foretold]:
    """By day, as far as labels were final when a day had landed; nothing without knowledge."""
    if not lake.exists("knowledge"):
        return []
    said = arrow.snapshot(lake, contracts.knowledge(lake.spec))
    happened = arrow.snapshot(lake, contracts.impressions(lake.spec))
    final = lake.spec.day_end(landed) * MICROS["s"]
    return [one for day in said.days() for one in _of_day(lake, day, said, happened, final)]


def _of_day(
    lake: Lake, day: date, said: Snapshot, happened: Snapshot, final: int
) -> Iterator[Foretold]:
    names = list(lake.spec.objectives)
    columns = ["impression_id", "surface", *(f"{p}_{n}" for n in names for p in ("label", "ready"))]
    logits = said.read(["impression_id", *(f"logit_{name}" for name in names)], day=day)
    rows = happened.read(columns, day=day).join(logits, "impression_id", join_type="inner")
    surfaces = {code: name for name, code in lake.spec.surface_codes.items()}
    for name in names:
        known = _known(rows, name, final)
        where = known["surface"].to_numpy().astype(np.int64)
        outcome, logit = (
            known[f"{what}_{name}"].to_numpy().astype(float) for what in ("label", "logit")
        )
        sums = _sums(where, outcome, logit)
        for code in np.flatnonzero(sums[0]):
            count, *rest = (float(column[code]) for column in sums)
            yield Foretold(day, surfaces[int(code)], name, int(count), *rest)


def _known(rows: pa.Table, objective: str, final: int) -> pa.Table:
    there = pc.and_(rows[f"label_{objective}"].is_valid(), rows[f"logit_{objective}"].is_valid())
    return rows.filter(pc.and_kleene(there, pc.less_equal(rows[f"ready_{objective}"], final)))


def _sums(where: npt.NDArray[np.int64], outcome: Floats, logit: Floats) -> list[Floats]:
    """Rows, outcomes, predictions and logloss by code."""
    said = 1 / (1 + np.exp(-logit))
    logloss = outcome * np.logaddexp(0, -logit) + (1 - outcome) * np.logaddexp(0, logit)
    weights = np.ones_like(said), outcome, said, logloss
    return [np.bincount(where, weight).astype(np.float64) for weight in weights]
