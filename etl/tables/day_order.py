"""The order of days: a step must not leave out days after those that it has finished.

Tables of a day are built from those of the days before it. If a step fails on a day, the next day
must not be built alone: its counters and pointers into histories would lack the events of that day.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, timedelta

from etl.errors import UserError
from etl.spec.units import DayRange
from etl.tables import atomic_io
from etl.tables.lake import Lake
from etl.tables.uri import StoragePath, read_text_if_exists, resolve_uri

LAST_DAYS_FOLDER = "_pipeline", "last_days"
TABLES_OF_STEPS = {
    "attributes": ("attributes_user", "attributes_item"),
    "labels": ("impressions",),
    "items": ("items",),
    "history": ("history",),
    "examples": ("examples",),
    "feature_statistics": ("feature_statistics",),
}


@contextmanager
def days_in_order(lake: Lake, step: str, days: DayRange) -> Iterator[None]:
    """Build days of a step in the context, and record the last one if that succeeds.

    A step of which no table exists may start on any day.

    Raises:
        UserError: The step has not finished the day before these, but an earlier one.
    """
    first, last = days
    finished = _last_day(lake, step) if any(map(lake.exists, TABLES_OF_STEPS[step])) else None
    if finished and finished + timedelta(days=1) < first:
        missing = finished + timedelta(days=1), first - timedelta(days=1)
        raise UserError(
            f"{step} of {missing[0]} to {missing[1]} was not finished, and {first} is built from "
            f"it: run this step and those after it with --days {missing[0]}:{last}"
        )
    yield
    atomic_io.write_text(_record(lake, step), str(max(last, finished or last)))


def reopen_days(lake: Lake, first: date) -> None:
    """Require the steps that read events to build the days from `first` on again."""
    for step in TABLES_OF_STEPS:
        finished = _last_day(lake, step)
        if step != "attributes" and finished and finished >= first:
            atomic_io.write_text(_record(lake, step), str(first - timedelta(days=1)))


def _last_day(lake: Lake, step: str) -> date | None:
    """The last day that a step has finished; None in lakes that do not record it yet."""
    text = read_text_if_exists(_record(lake, step))
    return date.fromisoformat(text) if text else None


def _record(lake: Lake, step: str) -> StoragePath:
    return resolve_uri(lake.root, *LAST_DAYS_FOLDER, f"{step}.txt")
