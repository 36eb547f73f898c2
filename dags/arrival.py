"""With which day a run begins, and which sources it goes without.

A day's sources are waited for until their files are complete, so many hours. Then the day goes on
without those that are not, as long as one log is. An ingest records the files that it has read.
Each later run looks for files that are new or changed since; if there are any it begins again with
their day, as long as the spec waits for late events (`lateness`). A source that never arrives is
named each day, and does not hold anything up.
"""

from collections.abc import Collection, Mapping
from datetime import date, timedelta

from dags.runs import Run
from etl.arrival import daily_sources, files_of_day, has_arrived, recorded_files
from etl.errors import UserError
from etl.spec import DataSpec
from etl.spec.units import each_day


def begin(spec: DataSpec, raw: str, lake: str, run: Run) -> Run:
    """What a run works on, given what earlier runs have read.

    Raises UserError where a new day has not one complete log.
    """
    absent = {day: missing(spec, raw, day) for day in each_day(run.new, run.last)}
    _refuse_empty(spec, raw, absent)
    oldest = run.last - timedelta(days=spec.lateness_days)
    earlier = each_day(oldest, run.new - timedelta(days=1))
    first = min([run.new, *(day for day in earlier if has_changed(spec, raw, lake, day))])
    again = each_day(first, run.new - timedelta(days=1))
    absent = {day: missing(spec, raw, day) for day in again} | absent
    lacking = {day: names for day, names in absent.items() if names}
    return run.model_copy(update={"first": first, "absent": lacking})


def missing(spec: DataSpec, raw: str, day: date) -> tuple[str, ...]:
    """The daily sources whose files of a day are not complete."""
    return tuple(name for name in daily_sources(spec) if not has_arrived(spec, raw, name, day))


def has_changed(spec: DataSpec, raw: str, lake: str, day: date) -> bool:
    """Whether a source that is complete has other files of a day than an ingest has read."""
    read = recorded_files(lake, day)
    if read is None:
        return False
    now = files_of_day(spec, raw, day)
    changed = (name for name, files in now.items() if files != read.get(name, {}))
    return any(has_arrived(spec, raw, name, day) for name in changed)


def _refuse_empty(spec: DataSpec, raw: str, absent: Mapping[date, Collection[str]]) -> None:
    for day, names in absent.items():
        if all(name in names for name in spec.logs):
            looked = ", ".join(spec.sources[name].path for name in spec.logs)
            raise UserError(
                f"no log of {day} is complete in {raw} (looked for {looked}): see why it was not "
                "written, then run this day again"
            )
