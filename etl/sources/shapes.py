"""Raw files by the columns that they hold, their days, and the files that cannot be read at all."""

import csv
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from pyspark.sql import SparkSession

from etl.errors import UserError
from etl.sources.storage import RawFile, files_like, first_line, footer, of_each
from etl.spec.sources import AttributeFile, EventLog, ImpressionLog
from etl.spec.units import each_day

AnySource = EventLog | ImpressionLog | AttributeFile
EMPTY, UNREADABLE = "empty file", "file cannot be read to its end"


@dataclass(frozen=True)
class Group:
    """Files with the same `columns`; None where each record names its own.

    `days` are by address, none where no path tells its day. Of `damaged` files what can be read is.
    """

    paths: tuple[str, ...]
    columns: tuple[str, ...] | None
    days: Mapping[str, date]
    damaged: bool = False


@dataclass(frozen=True)
class BadFile:
    """A file of which not all can be read: where it lies, its day, and why."""

    address: str
    day: date | None
    why: str


def find_files(
    raw: str, source: AnySource, days: tuple[date, date]
) -> list[tuple[date | None, list[RawFile]]]:
    """Files by the day that their path names, or all under None.

    Raises UserError where a day has none that holds anything, unless the source is sparse.
    """
    if "://" not in raw:
        if not Path(raw).is_dir():
            raise UserError(f"{raw}: no such folder of raw logs; name it with --raw")
        raw = str(Path(raw).absolute())
    if "{day}" not in source.path:
        return [(None, _found(f"{raw}/{source.path}", source.sparse))]
    path = f"{raw.rstrip('/')}/{source.path}"
    paths = {day: path.replace("{day}", str(day)) for day in each_day(*days)}
    return [(day, _found(path, source.sparse)) for day, path in paths.items()]


def _found(pattern: str, sparse: bool) -> list[RawFile]:
    files = files_like(pattern)
    if not sparse and not any(file.size for file in files):
        raise UserError(
            f"{pattern}: no such file, or only empty ones; check --raw and --days (a source "
            "without files on some days is `sparse: true` in the spec)"
        )
    return files


def groups(
    raw: str, source: AnySource, days: tuple[date, date], damaged: Collection[str]
) -> tuple[list[Group], list[BadFile]]:
    """All files of a source on some days; `damaged` are the addresses of those known to be so."""
    found: dict[tuple[str | None, bool], list[RawFile]] = defaultdict(list)
    dated: dict[str, date] = {}
    bad = []
    for day, files in find_files(raw, source, days):
        there = [file for file in files if file.size and file.address not in dated]
        dated |= {file.address: day for file in there if day}
        bad += [BadFile(file.address, day, EMPTY) for file in files if not file.size]
        bad += [BadFile(file.address, day, UNREADABLE) for file in there if file.address in damaged]
        for file, shape in _shapes(source, there):
            if shape is None and source.format != "json":
                bad.append(BadFile(file.address, day, UNREADABLE))
            else:
                found[shape, file.address in damaged].append(file)
    made = [
        Group(
            tuple(file.path for file in files),
            _columns(source, shape, files[0].path),
            {file.address: dated[file.address] for file in files if file.address in dated},
            broken,
        )
        for (shape, broken), files in found.items()
    ]
    return made, list(dict.fromkeys(bad))


def _shapes(source: AnySource, files: list[RawFile]) -> list[tuple[RawFile, str | None]]:
    if source.format == "json":
        return [(file, None) for file in files]
    return of_each(first_line if source.format == "csv" else footer, files)


def _columns(source: AnySource, shape: str | None, path: str) -> tuple[str, ...] | None:
    if shape is None:
        return None
    if source.format == "csv":
        return tuple(next(csv.reader([shape])))
    return tuple(SparkSession.active().read.parquet(path).columns)
