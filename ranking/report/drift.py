"""How far predictions drift: what GEM said of a day before learning it, over what happened."""

from collections.abc import Iterator
from datetime import date
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from etl.spec.units import MICROS
from etl.tables import arrow, contracts
from etl.tables.lake import Lake

FEWEST = 20  # expected outcomes of a day, below which a ratio is noise


class Drift(NamedTuple):
    """Predictions over outcomes of a surface and an objective on a day."""

    day: date
    surface: str
    objective: str
    ratio: float


def drift(lake: Lake, landed: date) -> list[Drift]:
    """By day, as far as labels were final when a day had landed; nothing without knowledge."""
    if not lake.exists("knowledge"):
        return []
    said = arrow.snapshot(lake, contracts.knowledge(lake.spec))
    happened = arrow.snapshot(lake, contracts.impressions(lake.spec))
    names = list(lake.spec.objectives)
    columns = ["impression_id", "surface", *(f"{p}_{n}" for n in names for p in ("label", "ready"))]
    found: list[Drift] = []
    for day in said.days():
        logits = said.read(["impression_id", *(f"logit_{name}" for name in names)], day=day)
        rows = happened.read(columns, day=day).join(logits, "impression_id", join_type="inner")
        found += _of_day(lake, day, rows, lake.spec.day_end(landed) * MICROS["s"])
    return found


def _of_day(lake: Lake, day: date, rows: pa.Table, final: int) -> Iterator[Drift]:
    surfaces = {code: name for name, code in lake.spec.surface_codes.items()}
    for name in lake.spec.objectives:
        there = pc.and_(rows[f"label_{name}"].is_valid(), rows[f"logit_{name}"].is_valid())
        known = rows.filter(pc.and_kleene(there, pc.less_equal(rows[f"ready_{name}"], final)))
        odds = pc.exp(pc.negate(known[f"logit_{name}"]))
        table = pa.table(
            {
                "surface": known["surface"],
                "said": pc.divide(1.0, pc.add(odds, 1.0)),
                "happened": known[f"label_{name}"],
            }
        )
        sums = table.group_by("surface").aggregate([("said", "sum"), ("happened", "sum")])
        for row in sums.sort_by("surface").to_pylist():
            if row["said_sum"] >= FEWEST and row["happened_sum"]:
                ratio = row["said_sum"] / row["happened_sum"]
                yield Drift(day, surfaces[row["surface"]], name, ratio)
