"""Samples of a user's files: their path patterns, their columns, and the inferred role of each."""

import csv
import gzip
import io
import itertools
import json
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from etl.errors import UserError

MAX_FILES, MAX_RECORDS = 8, 2_000  # per source
MIN_SHARE = 0.95  # of the values that agree with a guess: logs have bad records
FORMATS = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}
# Forms of a day in a path, and the placeholder for each.
DAY_PATTERNS = (
    (r"year=\d{4}/month=\d{2}/day=\d{2}", "year={day:%Y}/month={day:%m}/day={day:%d}"),
    (r"year=\d{4}/month=\d{1,2}/day=\d{1,2}", "year={day:%Y}/month={day:%-m}/day={day:%-d}"),
    (r"\d{4}-\d{2}-\d{2}", "{day}"),
    (r"(?<!\d)20\d{6}(?!\d)", "{day:%Y%m%d}"),
)
EPOCH_UNITS = (("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9))
FIRST_SECOND, LAST_SECOND = 946_684_800, 4_102_444_800  # 2000 to 2100
ISO_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d")
# Name pattern of the column of each role; the first match applies.
COLUMN_NAMES: Mapping[str, str] = {
    "event_id": r"(^|_)(event|log|record)_?id$|^id$",
    "request": r"(^|_)(request|req|session|query)(_?id)?$",
    "impression": r"(^|_)impression(_?id)?$",
    "user": r"(^|_)(user|member|viewer|customer|visitor|person)(_?(id|hash|key))?$|^(who|uid)$",
    "item": r"(^|_)(item|ad|video|product|article|sku|content|creative|clip|doc)(_?id)?$|^what$",
    "surface": r"(^|_)(surface|placement|page|tab|screen|slot_type|channel)(_?id)?$",
    "type": r"^(type|action|event|event_?type|event_?name|activity)$",
    "ingest_time": r"(ingest|logged|received|server|arrival|processed)",
    "event_time": r"(time|timestamp|^ts$|_ts$|_at$|^ms$|^at$|date_?time)",
    "position": r"(^|_)(position|rank|slot)$",
    "dwell": r"(dwell|play_time|watch|duration_viewed|viewed)",
    "value": r"(^|_)(value|price_paid|amount|revenue|euros|gmv)$",
    "propensity": r"propensity",
}


@dataclass
class Column:
    """Values of a column in the sample, null ones left out, and the number of each one's record."""

    name: str
    values: list[Any] = field(default_factory=list)
    records: list[int] = field(default_factory=list)

    def append(self, value: Any, record: int) -> None:
        """Add the value of a record."""
        self.values.append(value)
        self.records.append(record)

    @property
    def distinct(self) -> Counter[str]:
        """How often each value occurs, as text."""
        return Counter(str(value) for value in self.values if not isinstance(value, list))

    @property
    def listed(self) -> set[str]:
        """The texts, numbers and booleans in lists, as ingestion reads them."""
        elements = (e for value in self.values if isinstance(value, list) for e in value)
        texts = (e if isinstance(e, str) else json.dumps(e) for e in elements if _is_scalar(e))
        return {text for text in texts if text}

    def agrees(self, is_so: Callable[[Any], bool]) -> bool:
        """Whether a condition holds for nearly all values."""
        return bool(self.values) and sum(map(is_so, self.values)) >= MIN_SHARE * len(self.values)

    @property
    def is_number(self) -> bool:
        """Whether the values are numbers or read as such."""
        return self.agrees(lambda value: as_number(value) is not None)

    @property
    def is_flag(self) -> bool:
        """Whether the values are 0 and 1, or false and true."""
        return self.agrees(lambda value: str(value) in ("0", "1", "0.0", "1.0", "False", "True"))

    @property
    def is_id(self) -> bool:
        """Whether the column is called an id: its numbers are names, not amounts."""
        return bool(re.search(r"(^|_)(id|hash|key|code|tag)$", self.name.lower()))

    @property
    def is_list(self) -> bool:
        """Whether the values are lists."""
        return self.agrees(lambda value: isinstance(value, list))

    @property
    def vector_width(self) -> int | None:
        """The length of the lists of numbers that the column holds; None for other columns."""
        if not self.is_list or not all(_is_number_list(value) for value in self.values):
            return None
        lengths = set(map(len, self.values))
        return lengths.pop() or None if len(lengths) == 1 else None

    @property
    def day_format(self) -> str | None:
        """The format of the dates that the column holds; None for other columns."""
        for pattern, name in ((r"20\d{6}", "%Y%m%d"), (r"\d{4}-\d\d-\d\d", "%Y-%m-%d")):
            if self.agrees(partial(_matches, re.compile(pattern))):
                return name
        return None

    @property
    def time_unit(self) -> str | None:
        """`iso`, or the unit of epoch times; None if the values are not times of 2000 to 2100."""
        if self.agrees(lambda v: isinstance(v, datetime) or bool(ISO_TIME.match(str(v)))):
            return "iso"
        for unit, factor in EPOCH_UNITS:
            low, high = FIRST_SECOND * factor, LAST_SECOND * factor
            if self.agrees(partial(_is_between, low, high)):
                return unit
        return None


@dataclass
class SourceSample:
    """Files with one path pattern: their format and the columns of a sample."""

    pattern: str
    format: str
    files: list[Path]
    columns: dict[str, Column] = field(default_factory=dict)
    num_records: int = 0
    roles: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """A name for the source, from its path."""
        words = re.sub(r"(\w+=)?\{day[^}]*\}|\*|\.\w+", "", self.pattern)
        name = re.sub(r"\W+", "_", words).strip("_").lower() or "log"
        return name if name[0].isalpha() else f"log_{name}"

    @property
    def is_log(self) -> bool:
        """Whether the records look like events: a user, an item and a time."""
        return {"user", "item", "event_time"} <= set(self.roles)


def group_by_path_pattern(folder: Path) -> Iterator[tuple[str, str, list[Path]]]:
    """Path pattern, format and files of each group of files with the same pattern."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    groups: dict[tuple[str, str], list[Path]] = defaultdict(list)
    for file in sorted(folder.rglob("*")):
        if file.name == "_delta_log":
            raise UserError(
                f"{file.parent} is a Delta table, and a spec is inferred from files: write its "
                "source by hand, with `format: delta` (docs/guides/your-logs.md)"
            )
        kind = next((FORMATS[end] for end in file.suffixes if end in FORMATS), None)
        if file.is_file() and kind and file.name[0] not in "._":
            groups[path_pattern(file.relative_to(folder).as_posix()), kind].append(file)
    for (pattern, kind), files in groups.items():
        yield pattern, kind, files


def path_pattern(path: str) -> str:
    """A path with `{day}` for its date and `*` for what differs between files of one day."""
    for day, placeholder in DAY_PATTERNS:
        if re.search(day, path):
            head, tail = re.split(day, path, maxsplit=1)
            if "/" in tail:
                *folders, _ = tail.split("/")
                ending = re.search(r"(\.\w+)+$", tail)
                folders = [folders[0], *("*" for _ in folders[1:])]
                tail = "/".join([*folders, "*" + (ending[0] if ending else "")])
            return head + placeholder + tail
    return re.sub(r"(part|chunk)[-_]?[\w-]*(?=\.)", "*", path)


def read_sample(pattern: str, kind: str, files: Sequence[Path]) -> SourceSample:
    """The first records of some of the files, and the inferred role of each column."""
    sample = SourceSample(pattern, kind, list(files))
    step = max(1, len(files) // MAX_FILES)
    chosen = files[::step][:MAX_FILES]
    for file in chosen:
        for record in first_records(file, kind, MAX_RECORDS // len(chosen)):
            sample.num_records += 1
            for name, value in flatten(record):
                if value not in (None, ""):
                    column = sample.columns.setdefault(name, Column(name))
                    column.append(value, sample.num_records)
    sample.roles = guess_roles(sample)
    return sample


def first_records(file: Path, kind: str, number: int) -> list[Mapping[str, Any]]:
    """The first records of a file; raises UserError if it is corrupt or of another format."""
    try:
        return list(itertools.islice(read_records(file, kind), number))
    except (OSError, EOFError, ValueError, zlib.error, csv.Error) as error:
        raise UserError(
            f"{file} cannot be read ({' '.join(str(error).split())}); copy it again, or take it "
            "out of the folder"
        ) from None


def read_records(file: Path, kind: str) -> Iterator[Mapping[str, Any]]:
    """The records of a file, those that cannot be read left out."""
    if kind == "parquet":
        import pyarrow.parquet as pq

        for batch in pq.ParquetFile(file).iter_batches(256):
            yield from batch.to_pylist()
        return
    unpack = gzip.open if file.suffix == ".gz" else open
    with (
        cast(BinaryIO, unpack(file, "rb")) as binary,
        io.TextIOWrapper(binary, "utf-8-sig", errors="replace", newline="") as text,
    ):
        if kind == "csv":
            for row in csv.DictReader(text):
                row.pop(None, None)  # cells beyond the header
                yield row
            return
        for line in text:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record


def flatten(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values of a record; those of nested objects are joined by dots."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def guess_roles(sample: SourceSample) -> dict[str, str]:
    """The column of each role that a spec names, by the columns' names and values."""
    roles: dict[str, str] = {}
    for role, pattern in COLUMN_NAMES.items():
        for name, column in sample.columns.items():
            is_free = name not in roles.values()
            if (
                is_free
                and re.search(pattern, name.lower().replace(".", "_"))
                and _fits(role, column)
            ):
                roles[role] = name
                break
    return roles


def _fits(role: str, column: Column) -> bool:
    if role in ("event_time", "ingest_time"):
        return column.time_unit is not None
    if role in ("position", "dwell", "value", "propensity"):
        return column.is_number
    if role in ("type", "surface"):
        return not column.is_list and 0 < len(column.distinct) <= 127
    return column.time_unit is None


def as_number(value: Any) -> float | None:
    """A value as a number; None if it is not a number."""
    if isinstance(value, bool | datetime | list):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | int | float)


def _is_number_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(n, int | float) for n in value)


def _matches(pattern: re.Pattern[str], value: Any) -> bool:
    return pattern.fullmatch(str(value)) is not None


def _is_between(low: float, high: float, value: Any) -> bool:
    return low <= (as_number(value) or 0) < high
