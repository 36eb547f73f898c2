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
    """

    format: Format
    path: RawPath
    time_unit: Literal["s", "ms", "us"] = "ms"
    sparse: bool = False


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
    """Versions of entities; without `valid_from` a version holds for all time."""

    kind: Literal["attributes"]
    entity: Literal["user", "item"]
    key: str
    valid_from: str | None = None


Source = Annotated[EventLog | ImpressionLog | AttributeFile, Field(discriminator="kind")]
Sources = dict[Name, Source]
