"""Sources: where raw records are stored, and which of their columns mean what."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator
from typing_extensions import override

from etl.spec.base import (
    EventAttributeReference,
    EventName,
    Name,
    StrictModel,
    declared_in,
)
from etl.spec.file_source import FileSource
from etl.spec.report_sources import AudienceLabelSource, AuditSource, SpendSource
from etl.spec.units import Duration

DAY_FORMAT = re.compile(r"(%[Ymd]|[^%\w])+")


def _check_day_format(text: str) -> str:
    if not DAY_FORMAT.fullmatch(text) or {*re.findall("%.", text)} != {"%Y", "%m", "%d"}:
        raise ValueError(f"{text!r} is not the format of a day; use each of %Y, %m and %d")
    return text


class DayColumn(StrictModel):
    """The column that holds the day on which a row was logged."""

    column: str
    """Name of the raw column."""
    format: Annotated[str, AfterValidator(_check_day_format)] = "%Y-%m-%d"
    """How the column writes a day, with each of `%Y`, `%m` and `%d`."""


class EventColumns(StrictModel):
    """Raw columns of a log: `user`, `item`, `surface`, `event_time`, and others that it has.

    If a column is not given, events have no such value unless the key defines a default. An event
    log with `impression` or `touch` may leave out `user`, `item` and `surface`, such as a log of
    off-site conversions with the id of a click: its events have those of what they name. With
    `touch_key` of the source, it may leave out `item` and `surface`.
    """

    event_id: str | tuple[str, ...] | None = None
    """Id of the event, or columns that identify it together; default: user, item, time and type.

    What the event names takes the place of a user or an item that the log lacks.
    """
    user: str | None = None
    """Id of the user; default: that of the impression or touch."""
    item: str | None = None
    """Id of the item; default: that of the impression or touch."""
    surface: str | None = None
    """Surface of the event, as `surfaces.*.logged_as` names it; default: as for `item`."""
    event_time: str
    """When the event occurred, in `time_unit`."""
    type: str | None = None
    """Type of the event, as the keys of `types` name it; without it see `event`."""
    ingest_time: str | None = None
    """When the event was ingested, in `time_unit`; default: `event_time`."""
    request: str | None = None
    """Id of the request that the impression belongs to; default: see `request_session_gap`."""
    impression: str | None = None
    """Id of the impression that the event belongs to; default: outcomes are attributed."""
    touch: str | None = None
    """Id of the event of type `touch` of the source that the event follows, such as a click.

    It is unique among the events of that type. The event belongs to the impression of the touch.
    """
    touch_key: str | None = None
    """Value of the item attribute `touch_key` of the source, such as the id of the advertiser."""
    position: str | None = None
    """Position of the impression in its request."""
    dwell: str | None = None
    """How long the item was viewed, in milliseconds."""
    value: str | None = None
    """Value of the event, such as the money paid."""
    retracts: str | None = None
    """Id of an event of the same user that a retraction takes back, unique among its type."""
    propensity: str | None = None
    """Probability with which the logging policy showed this item at this position."""


class LogSource(FileSource):
    """What event logs and impression logs have in common."""

    day: DayColumn | None = None
    """Column with the day of a row, if files have no day; default: the day of its ingest."""
    delay: Duration = 0
    """How long after its ingest an event becomes visible to models and rankers."""
    columns: EventColumns
    """Raw columns of the log."""

    @property
    def fields_of_named(self) -> tuple[str, ...]:
        """The columns that the log lacks: events have the values of what they name."""
        columns = self.columns
        given = {"user": columns.user, "item": columns.item, "surface": columns.surface}
        return tuple(name for name, column in given.items() if column is None)

    @property
    def reference_column(self) -> str | None:
        """The column that leads to the events that have the fields that the log lacks."""
        columns = self.columns
        references = columns.touch or columns.impression or self.touch_key_column
        return references if self.fields_of_named else None

    @property
    def touch_key_column(self) -> str | None:
        """The column with what an event shares with its touch besides the user."""
        return self.columns.touch_key

    @property
    def names_events(self) -> bool:
        """Whether events of the log have fields of the events that they name."""
        return bool(self.fields_of_named or self.columns.touch)


class EventLogSource(LogSource):
    """A log with one row per event."""

    kind: Literal["event_log"]
    """`event_log`: one row per event."""
    types: dict[str, EventName] = {}
    """Event type of the spec by its name in the log; default: the log has the names of the spec."""
    event: EventName | None = None
    """Type of all events where `columns.type` is not given; default: the impression."""
    touch: EventName | None = None
    """Type of the events that `columns.touch` names, or that events follow by `touch_key`."""
    touch_key: Annotated[str, declared_in("attribution keys")] | None = None
    """What events and their touches share besides the user: `item`, or an attribute of the item.

    For logs without ids of touches, such as conversions with a user and an advertiser: an event has
    the item and the surface of the latest such touch, and belongs to its impression.
    """
    touch_window: Duration | None = None
    """How long after the touch an event may follow, where `touch_key` is given."""

    @property
    @override
    def touch_key_column(self) -> str | None:
        return self.columns.item if self.touch_key == "item" else self.columns.touch_key

    @model_validator(mode="after")
    def _check_event_type_source(self) -> "EventLogSource":
        if self.event and self.columns.type:
            raise ValueError("columns.type and event both give an event its type; keep one")
        return self

    @model_validator(mode="after")
    def _check_named_events(self) -> "EventLogSource":
        columns, lacking = self.columns, self.fields_of_named
        if not self.touch_key and (columns.touch is None) != (self.touch is None):
            raise ValueError(
                "columns.touch and `touch`, the type of the events that it names, go together, "
                "unless touch_key is given"
            )
        if columns.touch and columns.impression:
            raise ValueError("columns.touch and columns.impression both name an event; keep one")
        if lacking and not (columns.touch or columns.impression or self.touch_key):
            raise ValueError(
                f"columns.{lacking[0]} is required, unless columns.impression, columns.touch or "
                "touch_key leads to an event that has it"
            )
        return self

    @model_validator(mode="after")
    def _check_touch_key(self) -> "EventLogSource":
        columns = self.columns
        if self.touch_key is None:
            if columns.touch_key or self.touch_window is not None:
                raise ValueError("columns.touch_key and touch_window are for logs with touch_key")
            return self
        if columns.touch or columns.impression:
            raise ValueError("touch_key is for logs without ids of touches and impressions")
        if self.touch is None or self.touch_window is None:
            raise ValueError("touch_key needs `touch`, a type of events, and touch_window")
        if not self.fields_of_named:
            raise ValueError(
                "the log has users, items and surfaces: leave touch_key out, and give the "
                "objective an `attribution`"
            )
        return self

    @model_validator(mode="after")
    def _check_touch_key_columns(self) -> "EventLogSource":
        columns = self.columns
        if self.touch_key is None:
            return self
        if self.touch_key == "item" and columns.touch_key:
            raise ValueError("touch_key: item compares columns.item; leave columns.touch_key out")
        if self.touch_key != "item" and columns.item:
            raise ValueError(
                "the log has items: write `touch_key: item`, without columns.touch_key"
            )
        compared = {"user": columns.user, "touch_key": columns.touch_key}
        if self.touch_key == "item":
            compared = {"user": columns.user, "item": columns.item}
        for name, column in compared.items():
            if column is None:
                raise ValueError(f"touch_key: {self.touch_key} needs columns.{name}")
        return self


class OutcomeColumns(StrictModel):
    """Columns of one outcome in a wide impression log."""

    event: EventName
    """Type of the event."""
    indicator: str | None = None
    """Column that is true or not zero where the event occurred; default: it always occurred."""
    delay: str | None = None
    """Column with the time from the impression, in `time_unit` (`iso`: in ms); default: 0."""
    dwell: str | None = None
    """Column with how long the item was viewed, in milliseconds."""
    value: str | None = None
    """Column with the value of the event, such as the money paid."""
    attributes: tuple[EventAttributeReference, ...] = ()
    """Names of `attributes.event` that this outcome has; others are missing."""


class ImpressionLogSource(LogSource):
    """A wide log: one row per impression, with its outcomes as columns."""

    kind: Literal["impression_log"]
    """`impression_log`: one row per impression."""
    outcomes: tuple[OutcomeColumns, ...]
    """Outcome events that each row contains besides the impression."""

    @model_validator(mode="after")
    def _check_columns(self) -> "ImpressionLogSource":
        if self.fields_of_named:
            raise ValueError(f"columns.{self.fields_of_named[0]} is required")
        for name in ("touch", "touch_key"):
            if getattr(self.columns, name):
                raise ValueError(f"columns.{name} is for event logs: leave it out")
        return self


class AttributeSource(FileSource):
    """Versions of users or items: one row per version, with the values of its attributes.

    In files by day, a version is valid from its `valid_from`, but not before its day began; without
    `valid_from`, from the end of its day. A file whose path has no `{day}` is read again by each
    run and treated as one of the run's last day, unless it is `static`.
    """

    kind: Literal["attributes"]
    """`attributes`: versions of users or items."""
    entity: Literal["user", "item"]
    """Whose attributes the rows hold."""
    key: str
    """Column with the id of the user or item."""
    valid_from: str | None = None
    """Column with the time from which a version is valid, in `time_unit`."""
    static: bool = False
    """Whether rows never change; they are valid from their `valid_from`, or without it always."""
    delay: Duration = 0
    """How long after its valid-from time a version becomes visible to models and rankers."""

    @property
    def stores_changes(self) -> bool:
        """Whether only versions that differ from the previous one are stored.

        Files of users by day are stored as they are, because an erasure of what was known before a
        day must leave what later files state again.
        """
        return not self.static and (self.entity == "item" or not self.is_partitioned_by_day)

    @model_validator(mode="after")
    def _check_static_path(self) -> "AttributeSource":
        if self.static and self.is_partitioned_by_day:
            raise ValueError(
                "a static source is one file for all days: take {day} or `partition_column` out"
            )
        return self


Source = Annotated[
    EventLogSource
    | ImpressionLogSource
    | AttributeSource
    | AudienceLabelSource
    | AuditSource
    | SpendSource,
    Field(discriminator="kind"),
]
Sources = dict[Name, Source]


def provides_attributes_of(source: Source, entity: str) -> bool:
    """Whether a source holds the attributes of users, or of items."""
    return isinstance(source, AttributeSource) and source.entity == entity
