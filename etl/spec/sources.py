"""Where the raw records lie and which of their columns mean what."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from etl.spec.base import EventName, Name, Strict
from etl.spec.units import Duration

Format = Literal["json", "csv", "parquet"]


DAY_FORMAT = re.compile(r"(%[Ymd]|[^%\w])+")


def _below(path: str) -> str:
    if path.startswith("/"):
        raise ValueError("a path lies below the raw folder: write it without the leading /")
    return path


def _of_a_day(text: str) -> str:
    if not DAY_FORMAT.fullmatch(text) or {*re.findall("%.", text)} != {"%Y", "%m", "%d"}:
        raise ValueError(f"{text!r} is no format of a day; write it of %Y, %m and %d")
    return text


RawPath = Annotated[str, AfterValidator(_below)]


class DayColumn(Strict):
    """The column that names the day on which a row was logged; its format of %Y, %m and %d."""

    column: str
    format: Annotated[str, AfterValidator(_of_a_day)] = "%Y-%m-%d"


class EventColumns(Strict):
    """The log's names for what an event has. Only user, item, surface and event_time are needed."""

    event_id: str | tuple[str, ...] | None = None
    user: str
    item: str
    surface: str
    event_time: str
    type: str | None = None
    ingest_time: str | None = None
    request: str | None = None
    impression: str | None = None
    position: str | None = None
    dwell: str | None = None
    value: str | None = None
    propensity: str | None = None


class Files(Strict):
    """Files of one format; `path` is below the raw folder and may hold `{day}`.

    A `sparse` source may have no file on some days; without a file of any other, a day is refused.
    The files of a day are complete when the file `complete` lies in their folder; without such a
    marker, when none has changed for `unchanged_for`.
    """

    format: Format
    path: RawPath
    time_unit: Literal["s", "ms", "us"] = "ms"
    sparse: bool = False
    complete: RawPath | None = None
    unchanged_for: Duration = 600

    @property
    def is_by_day(self) -> bool:
        """Whether there are files of their own for each day."""
        return "{day}" in self.path

    @model_validator(mode="after")
    def _marker_of_a_day(self) -> "Files":
        folder = self.path.rpartition("/")[0]
        if self.complete and self.is_by_day and "{day}" not in folder + self.complete:
            raise ValueError("all days would share the marker `complete`: put {day} into its name")
        return self


class Log(Files):
    """What both kinds of log have.

    Where `path` holds no `{day}`, `day` names the column that tells it, else the day of the event
    is taken. `delay` is how long after its ingest an event becomes visible to a ranker.
    """

    day: DayColumn | None = None
    delay: Duration = 0
    columns: EventColumns


class EventLog(Log):
    """One row an event; `types` maps the log's own names of event types to those of the spec.

    A log of one type alone names it by `event`; without that and a column of types, all are
    impressions.
    """

    kind: Literal["event_log"]
    types: dict[str, EventName] = {}
    event: EventName | None = None

    @model_validator(mode="after")
    def _one_way_to_tell(self) -> "EventLog":
        if self.event and self.columns.type:
            raise ValueError("either columns.type tells an event's type, or event; not both")
        return self


class Outcome(Strict):
    """An event made of a column of a wide impression log.

    It happened where `when` is not zero (always, without `when`), `delay` after the impression.
    """

    event: EventName
    when: str | None = None
    delay: str | None = None
    dwell: str | None = None
    value: str | None = None


class ImpressionLog(Log):
    """One row an impression, its outcomes as columns."""

    kind: Literal["impression_log"]
    outcomes: tuple[Outcome, ...]


class AttributeFile(Files):
    """Versions of users or items.

    In files by day, a version holds from its `valid_from`, but not before its day began; without a
    `valid_from`, from the end of its day. A file whose path names no day is `static`: its rows hold
    from their `valid_from`, or for all time, and never change. Or it is read again by each run, and
    is treated as one of the run's last day. A version is visible `delay` after it holds.
    """

    kind: Literal["attributes"]
    entity: Literal["user", "item"]
    key: str
    valid_from: str | None = None
    static: bool = False
    delay: Duration = 0

    @model_validator(mode="after")
    def _static_without_days(self) -> "AttributeFile":
        if self.static and self.is_by_day:
            raise ValueError("a static source is one file for all days: take {day} out of its path")
        return self


Source = Annotated[EventLog | ImpressionLog | AttributeFile, Field(discriminator="kind")]
Sources = dict[Name, Source]
