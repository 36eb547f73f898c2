"""Files and Delta tables of a source: their place, their day, and which of their rows are read."""

import re
from datetime import date, datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from etl.spec.base import StrictModel
from etl.spec.expressions import ComputedColumn, Condition
from etl.spec.units import Duration

Format = Literal["json", "csv", "parquet", "delta"]
TimeUnit = Literal["s", "ms", "us", "ns", "iso"]
# `{day}` in a path, or `{day:FORMAT}` with a part of the day, such as `{day:%Y%m%d}`.
DAY_PLACEHOLDER = re.compile(r"\{day(?::([^}]*))?\}")
DIRECTIVES = {"%Y": r"\d{4}", "%m": r"\d{2}", "%d": r"\d{2}", "%-m": r"\d{1,2}", "%-d": r"\d{1,2}"}


def fill_day(text: str, day: date) -> str:
    """A path or file name with its `{day}` placeholders replaced by a day."""
    return DAY_PLACEHOLDER.sub(lambda match: day.strftime(match[1] or "%Y-%m-%d"), text)


def _check_relative_path(path: str) -> str:
    if path.startswith("/"):
        raise ValueError("a path is relative to the raw folder: write it without the leading /")
    if re.search("[{}]", DAY_PLACEHOLDER.sub("", path)):
        raise ValueError("a path has no braces but those of {day}: write *, or several sources")
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


ComputedName = Annotated[str, Field(pattern=r"^[^`.$\[]+$")]
RawPath = Annotated[str, AfterValidator(_check_relative_path)]


def _glob_regex(glob: str) -> str:
    """A regular expression for a glob without `{day}`."""
    return "".join({"*": "[^/]*", "?": "[^/]"}.get(sign, re.escape(sign)) for sign in glob)


def _format_regex(format_: str) -> str:
    parts = re.split("(%-?.)", format_)
    return "".join(DIRECTIVES.get(part, re.escape(part)) for part in parts)


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
    """Files of one format below the raw folder, or a Delta table.

    The files of a day are complete when `success_file` is in each of their folders; without such a
    marker, and in a Delta table, when none has changed for `unchanged_for`.
    """

    format: Format
    """Format of the files, or `delta`; `json` and `csv` may be compressed by gzip."""
    path: RawPath | None = None
    """Path or glob below the raw folder; `{day}` or `{day:%Y%m%d}` is the day of landing.

    Of a Delta table, the folder.
    """
    table: Annotated[str, Field(pattern=r"^\w+(\.\w+){0,2}$")] | None = None
    """Name of a Delta table in Spark's catalog, such as `ads.events`, in place of `path`."""
    partition_column: str | None = None
    """Partition column of a Delta table with the day of landing, in place of `{day}`."""
    where: Condition | None = None
    """Which records are read: a condition on raw columns, in Spark SQL; others are skipped."""
    select: dict[ComputedName, ComputedColumn] = {}
    """Columns that are computed from raw ones, by name: expressions in Spark SQL."""
    owner: str | None = None
    """Who answers for the data, such as a team; `gemline registry` shows it."""
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
        if self.format == "delta":
            return self.partition_column is not None
        return DAY_PLACEHOLDER.search(self.location) is not None

    @property
    def location(self) -> str:
        """The path below the raw folder, or the name of the table in the catalog."""
        return self.path or self.table or ""

    def location_in(self, raw: str) -> str:
        """The path with the raw folder, or the name of the table in the catalog."""
        return self.table or f"{raw}/{self.path}"

    def path_on(self, day: date) -> str:
        """The path or glob of the files of a day."""
        return fill_day(self.location, day)

    @property
    def any_day_glob(self) -> str:
        """A glob that matches the files of all days."""
        return DAY_PLACEHOLDER.sub("*", self.location)

    def day_of(self, path: str) -> date | None:
        """The day in a path below the raw folder; None if it is not a file of the source."""
        texts, formats, last = [], [], 0
        for match in DAY_PLACEHOLDER.finditer(self.location):
            format_ = match[1] or "%Y-%m-%d"
            before = _glob_regex(self.location[last : match.start()])
            texts += [before, f"({_format_regex(format_)})"]
            formats.append(format_.replace("%-", "%"))
            last = match.end()
        found = re.fullmatch("".join([*texts, _glob_regex(self.location[last:])]), path)
        if found is None or not formats:
            return None
        try:
            return datetime.strptime(" ".join(found.groups()), " ".join(formats)).date()
        except ValueError:
            return None

    @model_validator(mode="after")
    def _check_format(self) -> "FileSource":
        if self.format != "csv" and self.csv is not None:
            raise ValueError(f"`csv` has no meaning for files of the format {self.format}")
        if self.format == "delta":
            self._check_delta_table()
        elif self.table or self.partition_column:
            raise ValueError(f"`table` and `partition_column` are for Delta, not {self.format}")
        elif not self.path:
            raise ValueError("`path` is missing: where the files are, below the raw folder")
        return self

    def _check_delta_table(self) -> None:
        if bool(self.path) == bool(self.table):
            raise ValueError("a Delta table has a `path` or is a `table` of the catalog; give one")
        if self.path and (DAY_PLACEHOLDER.search(self.path) or "*" in self.path):
            raise ValueError(
                "the path of a Delta table is its folder, without {day} and *; name the partition "
                "column with the day in `partition_column`"
            )
        if self.success_file:
            raise ValueError("a commit to a Delta table is complete: it needs no `success_file`")

    @model_validator(mode="after")
    def _check_success_file(self) -> "FileSource":
        if self.success_file is None or not self.is_partitioned_by_day:
            return self
        folder = self.location.rpartition("/")[0]
        if not DAY_PLACEHOLDER.search(folder + self.success_file):
            raise ValueError("all days would share one `success_file`: put {day} into its name")
        return self
