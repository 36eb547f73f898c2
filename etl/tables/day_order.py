"""The order of days: a step must not leave out days after those that it has finished.

Tables of a day are built from those of the days before it. If a step fails on a day, the next day
must not be built alone: its counters and pointers into histories would lack the events of that day.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import date, timedelta
from typing import TYPE_CHECKING

from etl.errors import UserError
from etl.spec.model import DataSpec
from etl.spec.units import DayRange
from etl.tables import atomic_io
from etl.tables.uri import StoragePath, read_text_if_exists, resolve_uri

if TYPE_CHECKING:  # schedules of Airflow need no Delta
    from etl.tables.lake import Lake

LAST_DAYS_FOLDER = "_pipeline", "last_days"
TABLES_OF_STEPS = {
    "attributes": ("attributes_user", "attributes_item"),
    "labels": ("impressions",),
    "items": ("items",),
    "history": ("history",),
    "examples": ("examples",),
    "feature_statistics": ("feature_statistics",),
    "audience": ("audience_counts",),
    "campaign_days": ("campaign_days",),
}


@contextmanager
def days_in_order(lake: "Lake", step: str, days: DayRange) -> Iterator[None]:
    """Build days of a step in the context, and record the last one if that succeeds.

    A step of which no table exists may start on any day.

    Raises:
        UserError: The step has not finished the day before these, but an earlier one.
    """
    first, last = days
    has_tables = any(map(lake.exists, TABLES_OF_STEPS[step]))
    finished = last_finished_day(lake.root, step) if has_tables else None
    if finished is None:  # a failure leaves tables without the first days
        finished = first - timedelta(days=1)
        _record(lake.root, step, finished)
    if finished + timedelta(days=1) < first:
        missing = finished + timedelta(days=1), first - timedelta(days=1)
        raise UserError(
            f"{step} of {missing[0]} to {missing[1]} was not finished, and {first} is built from "
            f"it: run all steps together with --days {missing[0]}:{last}"
        )
    yield
    _record(lake.root, step, max(last, finished))


def reopen_days(spec: DataSpec, lake: str, first: date) -> None:
    """Require the steps that follow ingest to build the days from `first` on again.

    Some of them read raw files, which ingest records as read.
    """
    for step in TABLES_OF_STEPS:
        finished = last_finished_day(lake, step)
        precedes = step == "attributes" and spec.ingest_uses_item_attributes
        if finished and finished >= first and not precedes:
            _record(lake, step, first - timedelta(days=1))


def forget_days(lake: str, removed_tables: Collection[str]) -> None:
    """Let the steps whose tables were removed start on any day."""
    for step, tables in TABLES_OF_STEPS.items():
        if set(tables) & set(removed_tables):
            _path(lake, step).unlink(missing_ok=True)


def first_unfinished_day(spec: DataSpec, lake: str) -> date | None:
    """The first day that not all steps of a spec have finished; None in lakes without records."""
    declared = {"audience": bool(spec.audiences), "campaign_days": spec.roi is not None}
    steps = (step for step in TABLES_OF_STEPS if declared.get(step, True))
    finished = [day for step in steps if (day := last_finished_day(lake, step))]
    return min(finished) + timedelta(days=1) if finished else None


def last_finished_day(lake: str, step: str) -> date | None:
    """The last day that a step has finished; None in lakes that do not record it yet."""
    text = read_text_if_exists(_path(lake, step))
    return date.fromisoformat(text) if text else None


def _record(lake: str, step: str, day: date) -> None:
    atomic_io.write_text(_path(lake, step), str(day))


def _path(lake: str, step: str) -> StoragePath:
    return resolve_uri(lake, *LAST_DAYS_FOLDER, f"{step}.txt")
