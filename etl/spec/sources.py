"""Sources: where raw records are stored, and which of their columns mean what."""

import re
from datetime import date, datetime
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, Field, model_validator

from etl.spec.base import AudienceName, EventName, Name, StrictModel
from etl.spec.units import Duration

Format = Literal["json", "csv", "parquet"]
TimeUnit = Literal["s", "ms", "us", "ns", "iso"]
DAY_FORMAT = re.compile(r"(%[Ymd]|[^%\w])+")
# `{day}` in a path, or `{day:FORMAT}` with a part of the day, such as `{day:%Y%m%d}`.
DAY_PLACEHOLDER = re.compile(r"\{day(?::([^}]*))?\}")
DIRECTIVES = {"%Y": r"\d{4}", "%m": r"\d{2}", "%d": r"\d{2}", "%-m": r"\d{1,2}", "%-d": r"\d{1,2}"}


def fill_day(text: str, day: date) -> str:
    """A path or file name with its `{day}` placeholders replaced by a day."""
    return DAY_PLACEHOLDER.sub(lambda match: day.strftime(match[1] or "%Y-%m-%d"), text)


def _check_relative_path(path: str) -> str:
    if path.startswith("/"):
        raise ValueError("a path is relative to the raw folder: write it without the leading /")
    formats = [match[1] or "%Y-%m-%d" for match in DAY_PLACEHOLDER.finditer(path)]
    found = [directive for text in formats for directive in re.findall("%-?.", text)]
    unknown = sorted({*found} - {*DIRECTIVES})
    if unknown:
        raise ValueError(
            f"{{day}} in a path has the parts %Y, %m, %d, %-m and %-d, not {', '.join(unknown)}; "
            "write hours as *"
        )
    if formats and {directive[-1] for directive in found} != set("Ymd"):
        raise ValueError("{day} in a path has to name the year, the month and the day")
    return path


def _check_day_format(text: str) -> str:
    if not DAY_FORMAT.fullmatch(text) or {*re.findall("%.", text)} != {"%Y", "%m", "%d"}:
        raise ValueError(f"{text!r} is not the format of a day; use each of %Y, %m and %d")
    return text


RawPath = Annotated[str, AfterValidator(_check_relative_path)]


def _glob_regex(glob: str) -> str:
    """A regular expression for a glob without `{day}`."""
    return "".join({"*": "[^/]*", "?": "[^/]"}.get(sign, re.escape(sign)) for sign in glob)


def _format_regex(format_: str) -> str:
    parts = re.split("(%-?.)", format_)
    return "".join(DIRECTIVES.get(part, re.escape(part)) for part in parts)


class DayColumn(StrictModel):
    """The column that holds the day on which a row was logged."""

    column: str
    """Name of the raw column."""
    format: Annotated[str, AfterValidator(_check_day_format)] = "%Y-%m-%d"
    """How the column writes a day, with each of `%Y`, `%m` and `%d`."""


class EventColumns(StrictModel):
    """Raw columns of a log; only `user`, `item`, `surface` and `event_time` are required.

    If a column is not given, events have no such value unless the key defines a default.
    """

    event_id: str | tuple[str, ...] | None = None
    """Id of the event, or columns that identify it together; default: user, item, time and type."""
    user: str
    """Id of the user."""
    item: str
    """Id of the item."""
    surface: str
    """Surface on which the event occurred, as `surfaces.*.logged_as` names it."""
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
    position: str | None = None
    """Position of the impression in its request."""
    dwell: str | None = None
    """How long the item was viewed, in milliseconds."""
    value: str | None = None
    """Value of the event, such as the money paid."""
    retracts: str | None = None
    """Id of the event that a retraction takes back, unique among the events of its type."""
    propensity: str | None = None
    """Probability with which the logging policy showed this item at this position."""


class CsvOptions(StrictModel):
    """How CSV files are written; they are UTF-8, with one record a line."""

    delimiter: str = Field(default=",", min_length=1, max_length=1)
    """Delimiter between two columns, such as `"\\t"`."""
    quote: str = Field(default='"', min_length=1, max_length=1)
    """Quote character around a value that contains a delimiter."""
    escape: str = Field(default="\\", min_length=1, max_length=1)
    """Escape character before a quote within a quoted value."""
    null_value: str = ""
    """Text that represents a missing value, such as `\\N`."""
    header: tuple[str, ...] | None = None
    """Names of the columns, for files whose first line is a record; default: the first line."""


class FileSource(StrictModel):
    """Files of one format below the raw folder.

    The files of a day are complete when `success_file` is in their folder; without such a marker,
    when none has changed for `unchanged_for`.
    """

    format: Format
    """Format of the files; `json` and `csv` may be compressed by gzip."""
    path: RawPath
    """Path or glob below the raw folder; `{day}` or `{day:%Y%m%d}` is the day of landing."""
    csv: CsvOptions | None = None
    """How files of the format `csv` are written; default: commas, double quotes, a header line."""
    time_unit: TimeUnit = "ms"
    """Unit of all times: `s`, `ms`, `us` or `ns` since the epoch, or `iso`.

    `iso` is for ISO 8601 texts and timestamps of Parquet; without a zone they are in the spec's
    `time_zone`.
    """
    optional: bool = False
    """Whether some days may have no file; by default a missing file stops the run."""
    success_file: RawPath | None = None
    """Name of the file that marks a folder as complete, such as `_SUCCESS`."""
    unchanged_for: Duration = 600
    """Without `success_file`, how long files must be unchanged until a day is complete."""

    @property
    def is_partitioned_by_day(self) -> bool:
        """Whether each day has files of its own."""
        return DAY_PLACEHOLDER.search(self.path) is not None

    def path_on(self, day: date) -> str:
        """The path or glob of the files of a day."""
        return fill_day(self.path, day)

    @property
    def any_day_glob(self) -> str:
        """A glob that matches the files of all days."""
        return DAY_PLACEHOLDER.sub("*", self.path)

    def day_of(self, path: str) -> date | None:
        """The day in a path below the raw folder; None if it is not a file of the source."""
        texts, formats, last = [], [], 0
        for match in DAY_PLACEHOLDER.finditer(self.path):
            format_ = match[1] or "%Y-%m-%d"
            texts += [_glob_regex(self.path[last : match.start()]), f"({_format_regex(format_)})"]
            formats.append(format_.replace("%-", "%"))
            last = match.end()
        found = re.fullmatch("".join([*texts, _glob_regex(self.path[last:])]), path)
        if found is None or not formats:
            return None
        try:
            return datetime.strptime(" ".join(found.groups()), " ".join(formats)).date()
        except ValueError:
            return None

    @model_validator(mode="after")
    def _check_csv_options(self) -> "FileSource":
        if self.format != "csv" and self.csv is not None:
            raise ValueError(f"`csv` has no meaning for files of the format {self.format}")
        return self

    @model_validator(mode="after")
    def _check_success_file(self) -> "FileSource":
        if self.success_file is None or not self.is_partitioned_by_day:
            return self
        folder = self.path.rpartition("/")[0]
        if not DAY_PLACEHOLDER.search(folder + self.success_file):
            raise ValueError("all days would share one `success_file`: put {day} into its name")
        return self


FileSourceT = TypeVar("FileSourceT", bound=FileSource)


class LogSource(FileSource):
    """What event logs and impression logs have in common."""

    day: DayColumn | None = None
    """Column with the day of a row, where `path` has no `{day}`; default: the day of its ingest."""
    delay: Duration = 0
    """How long after its ingest an event becomes visible to models and rankers."""
    columns: EventColumns
    """Raw columns of the log."""


class EventLogSource(LogSource):
    """A log with one row per event."""

    kind: Literal["event_log"]
    """`event_log`: one row per event."""
    types: dict[str, EventName] = {}
    """Event type of the spec by its name in the log; default: the log has the names of the spec."""
    event: EventName | None = None
    """Type of all events where `columns.type` is not given; default: the impression."""

    @model_validator(mode="after")
    def _check_event_type_source(self) -> "EventLogSource":
        if self.event and self.columns.type:
            raise ValueError("columns.type and event both give an event its type; keep one")
        return self


class OutcomeColumns(StrictModel):
    """Columns of one outcome in a wide impression log."""

    event: EventName
    """Type of the event."""
    indicator: str | None = None
    """Column that is not zero where the event occurred; default: it always occurred."""
    delay: str | None = None
    """Column with the time from the impression, in `time_unit` (`iso`: in ms); default: 0."""
    dwell: str | None = None
    """Column with how long the item was viewed, in milliseconds."""
    value: str | None = None
    """Column with the value of the event, such as the money paid."""


class ImpressionLogSource(LogSource):
    """A wide log: one row per impression, with its outcomes as columns."""

    kind: Literal["impression_log"]
    """`impression_log`: one row per impression."""
    outcomes: tuple[OutcomeColumns, ...]
    """Outcome events that each row contains besides the impression."""


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

    @model_validator(mode="after")
    def _check_static_path(self) -> "AttributeSource":
        if self.static and self.is_partitioned_by_day:
            raise ValueError("a static source is one file for all days: take {day} out of its path")
        return self


class AudienceLabelColumns(StrictModel):
    """Raw columns of labels that data providers give users."""

    provider: str
    """Name of the provider, one of `audiences.*.providers`."""
    user: str
    """Id of the user."""
    label: str
    """What the provider states of the user; null or `unknown` if it does not know the user."""
    valid_from: str
    """When the provider delivered the label, in `time_unit`."""


class AudienceLabelSource(FileSource):
    """Labels of users by data providers: one row per label, valid until the provider's next one."""

    kind: Literal["audience_labels"]
    """`audience_labels`: labels that data providers give users."""
    audience: AudienceName
    """Which of the `audiences` the labels are about."""
    columns: AudienceLabelColumns
    """Raw columns of the labels."""

    @model_validator(mode="after")
    def _check_day_in_path(self) -> "AudienceLabelSource":
        return _require_day_in_path(self)


class AuditColumns(StrictModel):
    """Raw columns of an auditor's reports."""

    campaign: str
    """The audited campaign: a value of the attribute `audiences.*.campaign`."""
    true_class: str
    """One of `audiences.*.classes`."""
    share: str
    """Share of the class among the audited impressions, from 0 to 1."""
    count: str
    """Number of audited impressions of the campaign on the day."""


class AuditSource(FileSource):
    """Reports of an auditor: one row per campaign, day and class; the shares of a report sum to 1.

    A report is about impressions that landed on the day in its path.
    """

    kind: Literal["audits"]
    """`audits`: shares of the true classes among the impressions of campaigns."""
    audience: AudienceName
    """Which of the `audiences` the reports are about."""
    columns: AuditColumns
    """Raw columns of the reports."""

    @model_validator(mode="after")
    def _check_day_in_path(self) -> "AuditSource":
        return _require_day_in_path(self)


def _require_day_in_path(source: FileSourceT) -> FileSourceT:
    if not source.is_partitioned_by_day:
        raise ValueError("labels and audits are delivered by day: put {day} into the path")
    return source


Source = Annotated[
    EventLogSource | ImpressionLogSource | AttributeSource | AudienceLabelSource | AuditSource,
    Field(discriminator="kind"),
]
Sources = dict[Name, Source]


def provides_attributes_of(source: Source, entity: str) -> bool:
    """Whether a source holds the attributes of users, or of items."""
    return isinstance(source, AttributeSource) and source.entity == entity
