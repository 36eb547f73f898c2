"""Which logs of a day have come, and which day a run begins with.

The rule: a day's sources are waited for, all of them, so many hours. Then the day goes on without
those that did not come, as long as one log came. Each later run looks whether they have come since;
if so it begins again with their day, as long as the spec waits for late events (`lateness`). A
source that never comes is told of each day, and holds nothing up.
"""

from collections.abc import Collection, Iterable, Mapping
from datetime import date, timedelta

from dags.runs import Run
from etl.errors import UserError
from etl.spec import DataSpec
from etl.spec.units import each_day
from etl.tables.place import place


def daily(spec: DataSpec) -> list[str]:
    """The sources that have files of their own for each day, and may not lack them."""
    return [
        name
        for name, source in spec.sources.items()
        if "{day}" in source.path and not source.sparse
    ]


def missing(spec: DataSpec, raw: str, day: date) -> tuple[str, ...]:
    """The daily sources that have no file of a day."""
    return tuple(name for name in daily(spec) if not arrived(spec, raw, name, day))


def arrived(spec: DataSpec, raw: str, source: str, day: date) -> bool:
    """Whether a source has a file of a day."""
    path = spec.sources[source].path.replace("{day}", str(day))
    return any(place(raw).glob(path))


def begin(spec: DataSpec, raw: str, run: Run, earlier: Iterable[Run]) -> Run:
    """What a run works on, given what earlier runs lacked, the oldest run first.

    Raises UserError where a new day has not one log.
    """
    absent = {day: missing(spec, raw, day) for day in each_day(run.new, run.last)}
    _refuse_empty(spec, raw, absent)
    oldest = run.last - timedelta(days=spec.lateness_days)
    lacking: dict[date, tuple[str, ...]] = {}
    for before in earlier:
        lacking |= {day: before.absent.get(day, ()) for day in each_day(before.first, before.last)}
    late = [
        day
        for day, sources in lacking.items()
        if oldest <= day < run.new and any(arrived(spec, raw, name, day) for name in sources)
    ]
    first = min([run.new, *late])
    again = each_day(first, run.new - timedelta(days=1))
    absent = {day: missing(spec, raw, day) for day in again} | absent
    lacked = {day: names for day, names in absent.items() if names}
    return run.model_copy(update={"first": first, "absent": lacked})


def _refuse_empty(spec: DataSpec, raw: str, absent: Mapping[date, Collection[str]]) -> None:
    for day, names in absent.items():
        if all(name in names for name in spec.logs):
            looked = ", ".join(spec.sources[name].path for name in spec.logs)
            raise UserError(
                f"no log of {day} is in {raw} (looked for {looked}): see why it was not written, "
                "then run this day again"
            )
