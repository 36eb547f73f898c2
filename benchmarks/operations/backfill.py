"""A backfill of seven days at once beside seven runs of a day each."""

import os
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.demo import SPEC, place_in, run_here, write_logs
from benchmarks.result import Result
from dags.line import Days, Place, data_steps, model_steps
from etl.spec import DataSpec, load_spec
from etl.spec.units import each_day
from etl.tables import arrow
from etl.tables.lake import Lake
from etl.told import all_contracts

WORLD = {"users": 150, "events_per_user_mean": 80, "max_events_per_user": 600, "days": 7}
FIRST, LAST = date(2026, 1, 1), date(2026, 1, 7)


def measure(result: Result) -> None:
    """`backfill_equal`: whether every row of every table, GEM's knowledge too, is the same."""
    os.environ.setdefault("GEMLINE_SPARK_MASTER", "local[2]")
    spec = load_spec(SPEC)
    with tempfile.TemporaryDirectory() as work:
        once, daily = (place_in(work, name) for name in ("once", "daily"))
        write_logs(Path(once.raw), WORLD)
        run(spec, once, FIRST, LAST)
        for day in each_day(FIRST, LAST):
            run(spec, daily, day, day)
        ours, theirs = (Lake(place.lake, spec) for place in (once, daily))
        names = [name for name in all_contracts(spec) if ours.exists(name)]
        apart = [name for name in names if not same(ours, theirs, name)]
    result.figures["backfill_equal"] = not apart
    told = f"differ: {', '.join(apart)}" if apart else f"{len(names)} tables equal"
    result.rows.append(("seven days at once", told, "seven daily runs", "", "the same"))


def run(spec: DataSpec, place: Place, first: date, last: date) -> None:
    """What a run of the tables and of GEM does for some days."""
    days = Days(first, last, last, None, last, last)
    learn, _ = model_steps(spec, place, days.model_flags, ("--scale", "tiny"))
    run_here([*data_steps(place, days.landed), *learn])


def same(one: Lake, other: Lake, name: str) -> bool:
    """Whether a table has the same rows in both lakes, in whatever order.

    But for `history_version`: how often the table that an example points into had been written.
    """
    contract = all_contracts(one.spec)[name]
    return _rows(arrow.snapshot(one, contract).read()) == _rows(
        arrow.snapshot(other, contract).read()
    )


def _rows(table: pa.Table) -> list[Any]:
    kept = [name for name in table.column_names if name != "history_version"]
    return sorted(map(repr, table.select(kept).to_pylist()))
