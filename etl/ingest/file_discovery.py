"""Discovery of raw files on any Hadoop file system, grouped by their columns.

Files of one source may differ in columns (schema drift): each group is read with its own schema.
Empty or unreadable files are listed separately, to be quarantined.
"""

import csv
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from etl.errors import UserError
from etl.spec.file_source import CsvOptions
from etl.spec.sources import Source
from etl.spec.units import DayRange, date_range
from etl.tables.uri import is_url

EMPTY_FILE, UNREADABLE_FILE = "empty file", "file cannot be read to its end"
MAX_PARALLEL_READS = 16
# Pattern and replacement: Hadoop and Spark write local URIs with one slash or three.
LOCAL_URI_REWRITE = ("^file:/+", "file:///")


@dataclass(frozen=True)
class RawSelection:
    """Which raw files to read: those of a range of days below a folder or URL."""

    root: str
    days: DayRange
    corrupt_files: Collection[str] = ()  # URIs of files to be read as far as possible
    allow_empty_days: bool = False  # days may have no events


@dataclass(frozen=True)
class RawFile:
    """A raw file."""

    path: str  # as passed to Spark's readers
    size: int  # bytes
    uri: str  # as returned by `normalize_uri`


def glob_files(pattern: str) -> list[RawFile]:
    """Files that match a glob pattern, sorted, without hidden ones."""
    path = _hadoop_fs().Path(pattern)
    statuses = path.getFileSystem(_hadoop_conf()).globStatus(path) or []
    files = [_raw_file(status) for status in statuses if status.isFile()]
    visible = [file for file in files if file.path.rsplit("/", 1)[-1][0] not in "._"]
    return sorted(visible, key=str)


def _raw_file(status: Any) -> RawFile:
    path = status.getPath()
    return RawFile(path.toString(), status.getLen(), normalize_uri(path.toUri().toString()))


def normalize_uri(uri: str) -> str:
    """The canonical form of a URI: a local URI has three slashes."""
    return re.sub(*LOCAL_URI_REWRITE, uri)


def is_compressed(path: str) -> bool:
    """Whether a text file is compressed, by its name."""
    return _compression_codec(_hadoop_fs().Path(path)) is not None


def _compression_codec(hadoop_path: Any) -> Any:
    compress = _jvm().org.apache.hadoop.io.compress
    return compress.CompressionCodecFactory(_hadoop_conf()).getCodec(hadoop_path)


def read_first_line(path: str) -> str | None:
    """The first line of a text file, decompressed by its name; None if that fails."""
    jvm, hadoop_path = _jvm(), _hadoop_fs().Path(path)
    codec = _compression_codec(hadoop_path)
    stream = hadoop_path.getFileSystem(_hadoop_conf()).open(hadoop_path)
    try:
        stream = codec.createInputStream(stream) if codec else stream
        utf8 = jvm.java.nio.charset.StandardCharsets.UTF_8
        lines = jvm.java.io.BufferedReader(jvm.java.io.InputStreamReader(stream, utf8))
        line: str | None = lines.readLine()
        return line and line.removeprefix("\ufeff")
    except Py4JJavaError:
        return None
    finally:
        stream.close()


def read_parquet_footer(path: str) -> str | None:
    """The schema in the footer of a Parquet file, as text; None if it cannot be read."""
    hadoop = _jvm().org.apache.parquet.hadoop
    try:
        file = hadoop.util.HadoopInputFile.fromPath(_hadoop_fs().Path(path), _hadoop_conf())
        reader = hadoop.ParquetFileReader.open(file)
    except Py4JJavaError:
        return None
    try:
        return str(reader.getFileMetaData().getSchema().toString())
    finally:
        reader.close()


def _jvm() -> Any:
    return SparkSession.active().sparkContext._jvm


def _hadoop_fs() -> Any:
    return _jvm().org.apache.hadoop.fs


def _hadoop_conf() -> Any:
    return SparkSession.active().sparkContext._jsc.hadoopConfiguration()


@dataclass(frozen=True)
class FileGroup:
    """Files with the same columns, read as one."""

    paths: tuple[str, ...]
    columns: tuple[str, ...] | None  # None for JSON, where each record names its own
    day_by_uri: Mapping[str, date]  # empty if paths do not contain the day
    is_corrupt: bool = False  # read as far as possible


@dataclass(frozen=True)
class UnreadableFile:
    """A file that is empty or cannot be read to its end."""

    uri: str
    day: date | None
    reason: str


def find_files(source: Source, selection: RawSelection) -> list[tuple[date | None, list[RawFile]]]:
    """Files of a source by day; all under None if its path does not contain `{day}`.

    Raises:
        UserError: If a day has no file with content and the source is not optional.
    """
    root = absolute_root(selection.root)
    if not source.is_partitioned_by_day:
        return [(None, _matching_files(f"{root}/{source.location}", source.optional))]
    return [
        (day, _matching_files(f"{root}/{source.path_on(day)}", source.optional))
        for day in date_range(*selection.days)
    ]


def absolute_root(root: str) -> str:
    """The raw folder as an absolute path or a URL; raises UserError if a folder is missing."""
    if not is_url(root):
        if not Path(root).is_dir():
            raise UserError(f"{root}: folder of raw logs not found; check --raw")
        root = str(Path(root).absolute())
    return root.rstrip("/")


def latest_day_with_files(source: Source, raw: str) -> date | None:
    """The latest day of a source that has files; None without any, or without a day in its path."""
    root = absolute_root(raw)
    folder = normalize_uri(root if is_url(root) else Path(root).as_uri())
    files = glob_files(f"{root}/{source.any_day_glob}")
    paths = [file.uri.removeprefix(folder).lstrip("/") for file in files if file.size]
    return max(filter(None, map(source.day_of, paths)), default=None)


def _matching_files(pattern: str, optional: bool) -> list[RawFile]:
    files = glob_files(pattern)
    if not optional and not any(file.size for file in files):
        raise UserError(
            f"{pattern}: no file, or only empty files; check --raw and --days (or set `optional: "
            "true` in the spec for a source that lacks files on some days)"
        )
    return files


def group_files(
    source: Source, selection: RawSelection
) -> tuple[list[FileGroup], list[UnreadableFile]]:
    """Files of a source by their columns, and those that are unreadable.

    Corrupt files are in both lists: what can be read of them is used.
    """
    groups: dict[tuple[str | None, bool], list[RawFile]] = defaultdict(list)
    day_by_uri: dict[str, date] = {}
    unreadable: list[UnreadableFile] = []
    for day, files in find_files(source, selection):
        unreadable += [UnreadableFile(file.uri, day, EMPTY_FILE) for file in files if not file.size]
        readable = [file for file in files if file.size and file.uri not in day_by_uri]
        for file, header in zip(readable, _read_headers(source, readable), strict=True):
            if day:
                day_by_uri[file.uri] = day
            is_corrupt = file.uri in selection.corrupt_files
            has_header = header is not None or source.format == "json"
            if has_header:
                groups[header, is_corrupt].append(file)
            if is_corrupt or not has_header:
                unreadable.append(UnreadableFile(file.uri, day, UNREADABLE_FILE))
    file_groups = [
        FileGroup(
            tuple(file.path for file in files),
            _header_columns(source, header, files[0].path),
            {file.uri: day_by_uri[file.uri] for file in files if file.uri in day_by_uri},
            is_corrupt,
        )
        for (header, is_corrupt), files in groups.items()
    ]
    return file_groups, list(dict.fromkeys(unreadable))


def _read_headers(source: Source, files: list[RawFile]) -> list[str | None]:
    """First lines of CSV files, or schemas of Parquet files, read in parallel; None for JSON."""
    if source.format == "json":
        return [None] * len(files)
    read = read_first_line if source.format == "csv" else read_parquet_footer
    with ThreadPoolExecutor(MAX_PARALLEL_READS) as pool:
        return list(pool.map(read, [file.path for file in files]))


def _header_columns(source: Source, header: str | None, path: str) -> tuple[str, ...] | None:
    if header is None:
        return None
    if source.format == "csv":
        options = source.csv or CsvOptions()
        lines = csv.reader([header], delimiter=options.delimiter, quotechar=options.quote)
        names = options.header or next(lines)
        _check_names_differ(names, path)
        return tuple(names)
    return tuple(SparkSession.active().read.parquet(path).columns)


def _check_names_differ(names: Sequence[str], path: str) -> None:
    """Raise UserError if columns of a CSV file have the same name, in upper or lower case."""
    counts = Counter(name.lower() for name in names)
    if repeated := [name for name in names if counts[name.lower()] > 1]:
        raise UserError(
            f"{path}: several columns have the same name, in upper or lower case: "
            f"{', '.join(map(repr, repeated))}; rename all but one of them in the file"
        )
