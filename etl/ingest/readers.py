"""Readers of raw files and Delta tables: columns as text, with the location and read errors.

All values are read as text, so that a value of a wrong type is quarantined instead of failing the
read. Each record carries its payload (JSON), its file, its position in it, and the day in its path.
"""

import functools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, DataFrameReader, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, StringType, StructField, StructType, TimestampType

from etl.errors import UserError
from etl.ingest.delta_tables import latest_delta_day, read_delta_table
from etl.ingest.expressions import logged_columns_of, with_expressions
from etl.ingest.file_discovery import (
    EMPTY_FILE,
    LOCAL_URI_REWRITE,
    UNREADABLE_FILE,
    FileGroup,
    RawSelection,
    UnreadableFile,
    group_files,
    latest_day_with_files,
    normalize_uri,
)
from etl.spec.file_source import CsvOptions
from etl.spec.sources import Source

PAYLOAD, SOURCE_FILE, PATH_DAY, READ_ERROR = "payload", "source_file", "path_day", "read_error"
RECORD_LOCATION = "record_location"  # struct of the block of its file and a row number, see below
CORRUPT_RECORD = "_corrupt_record"
NOT_A_RECORD, RECORD_TOO_LONG = "not a record", "longer than a record can be"
MAX_RECORD_CHARS = 1_000_000


class UnreadableFileError(UserError):
    """A raw file cannot be read to its end."""

    def __init__(self, uri: str) -> None:
        super().__init__(
            f"{uri}: cannot be read to its end (a corrupt gzip, or another format or header than "
            "in the spec?); copy it again, or correct the spec"
        )
        self.uri = uri


@dataclass(frozen=True)
class RawColumns:
    """The columns that are read; those that a file needs, and those that one of them needs."""

    selected: list[str]
    required: list[str]
    expected: list[str]


@contextmanager
def translate_read_errors() -> Iterator[None]:
    """Raise an UnreadableFileError with the file's URI for Spark's failure to read a raw file."""
    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        match = re.search(
            r"\[FAILED_READ_FILE\S*\] Encountered error while reading file (\S+)", str(error)
        )
        if not match:
            raise
        raise UnreadableFileError(normalize_uri(match[1].rstrip("."))) from None


def read_raw_records(
    source: Source,
    selection: RawSelection,
    columns: Collection[str],
    required: Collection[str] = (),
    optional: Collection[str] = (),
) -> DataFrame:
    """Records of a source's selected files.

    Returns:
        `raw`, a struct of at least `columns` as text; `payload`; `source_file`; `record_location`;
        `path_day`, the day in the path, null if it contains none; `read_error`, the reason why a
        record or its whole file is invalid: not parseable, empty, corrupt, or without a `required`
        column; and `is_selected`. Records that are not selected are there for the numbers of lines.

    Raises:
        UserError: If no file matches and the source is not optional, or no file has a column that
            is not `optional`.
    """
    raw_columns = RawColumns(
        selected=logged_columns_of(source, columns),
        required=[name for name in required if name not in source.select],
        expected=logged_columns_of(source, [name for name in columns if name not in optional]),
    )
    read = _read_delta if source.format == "delta" else _read_files
    rows = read(source, selection, raw_columns)
    return with_expressions(source, rows, _is_unreadable())


def _read_files(source: Source, selection: RawSelection, columns: RawColumns) -> DataFrame:
    groups, unreadable = group_files(source, selection)
    headers = [group.columns for group in groups if group.columns is not None]
    if len(headers) == len(groups):
        _check_columns_exist(source, headers, columns.expected)
    parts = [_READERS[source.format](source, group, columns) for group in groups]
    if unreadable or not parts:
        parts.append(_unreadable_file_records(unreadable, columns.selected))
    return functools.reduce(DataFrame.unionByName, parts)


def _is_unreadable() -> Column:
    """Whether a record or its whole file could not be parsed, so that its columns are unknown."""
    reasons = (NOT_A_RECORD, RECORD_TOO_LONG, EMPTY_FILE, UNREADABLE_FILE)
    return F.coalesce(F.col(READ_ERROR).isin(*reasons), F.lit(False))


def latest_day_with_records(source: Source, raw: str) -> date | None:
    """The latest day of a source that is partitioned by day; None if it has no records."""
    latest = latest_delta_day if source.format == "delta" else latest_day_with_files
    return latest(source, raw)


def raw_value(column: str) -> Column:
    """The text of a raw column; null if the record has none."""
    return F.col("raw").getField(column)


def parse_quarantined(source: Source, rows: DataFrame, columns: Iterable[str]) -> DataFrame:
    """`rows` with `raw`, `read_error` and `is_selected`, from the payload that quarantine keeps."""
    rows = _parse_payload(rows, logged_columns_of(source, columns))
    return with_expressions(source, rows, _is_unreadable())


def _parse_payload(rows: DataFrame, columns: list[str]) -> DataFrame:
    """`rows` with `raw` and `read_error` parsed from their JSON payload."""
    fields = [StructField(name, StringType()) for name in [*columns, CORRUPT_RECORD]]
    nested = {n: F.get_json_object(PAYLOAD, f"$.{n}") for n in columns if is_path(n)}
    is_too_long = F.length(PAYLOAD) > MAX_RECORD_CHARS
    payload = F.when(~is_too_long, F.col(PAYLOAD))
    raw = F.from_json(payload, StructType(fields), {"columnNameOfCorruptRecord": CORRUPT_RECORD})
    is_malformed = F.col(f"raw.{CORRUPT_RECORD}").isNotNull() | F.col("raw").isNull()
    read_error = F.when(is_too_long, F.lit(RECORD_TOO_LONG)).when(is_malformed, F.lit(NOT_A_RECORD))
    rows = rows.withColumn("raw", raw).withColumn(READ_ERROR, read_error)
    raw = F.col("raw").dropFields(CORRUPT_RECORD)
    for name, value in nested.items():
        raw = raw.withField(f"`{name}`", F.coalesce(raw_value(name), value))
    return rows.withColumn("raw", raw)


def is_path(column: str) -> bool:
    """Whether a column of a spec may be a path into nested fields: `user.id`, `items[0].id`."""
    return "." in column or "[" in column


def _check_columns_exist(
    source: Source, headers: Iterable[Iterable[str]], expected: list[str]
) -> None:
    """Raise UserError if no file has one of the expected columns; `headers` are those of files."""
    existing = list(dict.fromkeys(name for columns in headers for name in columns))
    missing = [
        name
        for name in expected
        if name not in existing
        and not (source.format in ("parquet", "delta") and name.split(".")[0] in existing)
    ]
    if existing and missing:
        raise UserError(
            f"{source.location}: the spec names {', '.join(missing)}, which the files lack; they "
            f"have {', '.join(existing)}"
        )


def _spark_reader(group: FileGroup) -> DataFrameReader:
    return SparkSession.active().read.option("ignoreCorruptFiles", group.is_corrupt)


def _read_json(_source: Source, group: FileGroup, columns: RawColumns) -> DataFrame:
    lines = _spark_reader(group).text(list(group.paths))
    records = lines.select(F.col("value").alias(PAYLOAD), "_metadata")
    return _with_path_day(
        _with_location(_parse_payload(records, columns.selected)), group.day_by_uri
    )


def _read_csv(source: Source, group: FileGroup, columns: RawColumns) -> DataFrame:
    names = [*(group.columns or ()), CORRUPT_RECORD]
    schema = StructType([StructField(name, StringType()) for name in names])
    options = source.csv or CsvOptions()
    reader = (
        _spark_reader(group)
        .schema(schema)
        .options(
            header=options.header is None,
            sep=options.delimiter,
            quote=options.quote,
            escape=options.escape,
            nullValue=options.null_value,
            columnNameOfCorruptRecord=CORRUPT_RECORD,
        )
    )
    rows = reader.csv(list(group.paths))
    read_error = F.when(F.col(CORRUPT_RECORD).isNotNull(), F.lit(NOT_A_RECORD))
    records = _records_from_columns(rows, group.columns or (), columns, read_error)
    return _with_path_day(records, group.day_by_uri)


def _read_parquet(_source: Source, group: FileGroup, columns: RawColumns) -> DataFrame:
    rows = _spark_reader(group).parquet(*group.paths)
    records = _records_from_columns(rows, group.columns or (), columns, F.lit(None))
    return _with_path_day(records, group.day_by_uri)


def _read_delta(source: Source, selection: RawSelection, columns: RawColumns) -> DataFrame:
    rows = read_delta_table(source, selection, PATH_DAY)
    if rows is None:
        return _unreadable_file_records([], columns.selected)
    existing = [name for name in rows.columns if name != PATH_DAY]
    _check_columns_exist(source, [existing], columns.expected)
    return _records_from_columns(rows, existing, columns, F.lit(None), PATH_DAY)


def _records_from_columns(
    rows: DataFrame,
    existing: Iterable[str],
    columns: RawColumns,
    read_error: Column,
    *others: str,
) -> DataFrame:
    """Rows of a columnar file as records; all are invalid if it lacks a required column."""
    null = F.lit(None).cast("string")
    texts = {name: _text_of(rows, name) for name in columns.selected}
    missing = [name for name in columns.required if texts[name] is None]

    def in_payload(field: StructField) -> Column:
        is_time = field.dataType.typeName().startswith("timestamp")  # JSON would cut it to ms
        text = _text_of(rows, field.name) if is_time else None
        return F.col(f"`{field.name}`") if text is None else text.alias(field.name)

    file_error = F.lit(f"file lacks {', '.join(missing)}" if missing else None).cast("string")
    records = rows.select(
        F.struct(*[(null if t is None else t).alias(n) for n, t in texts.items()]).alias("raw"),
        F.to_json(F.struct(*[in_payload(rows.schema[name]) for name in existing])).alias(PAYLOAD),
        F.coalesce(file_error, read_error).alias(READ_ERROR),
        "_metadata",
        *others,
    )
    return _with_location(records, *others)


def _text_of(rows: DataFrame, name: str) -> Column | None:
    """A column, or a nested field by its path, as text; None if the file has none.

    Timestamps keep their zone: they are instants that do not depend on the session's time zone.
    Lists and structures are JSON.
    """
    type_: DataType = rows.schema
    parts = [name] if name in rows.columns else name.split(".")
    for part in parts:
        if not isinstance(type_, StructType) or part not in type_.names:
            return None
        type_ = type_[part].dataType
    column = F.col(".".join(f"`{part}`" for part in parts))
    if isinstance(type_, TimestampType):
        return F.date_format(column, "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX")
    if type_.typeName() in ("array", "map", "struct"):
        return F.to_json(column)
    return column.cast("string")


def _with_location(rows: DataFrame, *others: str) -> DataFrame:
    """Records with their file, block and row."""
    location = F.struct(
        F.col("_metadata.file_block_start").alias("block"),
        F.monotonically_increasing_id().alias("row"),
    )
    source_file = F.regexp_replace("_metadata.file_path", *LOCAL_URI_REWRITE).alias(SOURCE_FILE)
    return rows.select(
        "raw", PAYLOAD, source_file, location.alias(RECORD_LOCATION), READ_ERROR, *others
    )


def _with_path_day(rows: DataFrame, day_by_uri: Mapping[str, date]) -> DataFrame:
    """Records with the days of their files, joined by URI: one plan for any number of days.

    The read fails if Spark reports a URI that was not listed, because the record would otherwise be
    treated as one of a file without a day.
    """
    if not day_by_uri:
        return rows.withColumn(PATH_DAY, F.lit(None).cast("date"))
    days = pa.table({SOURCE_FILE: list(day_by_uri), PATH_DAY: list(day_by_uri.values())})
    files = SparkSession.active().createDataFrame(days)
    unlisted = F.raise_error(F.concat(SOURCE_FILE, F.lit(" was not listed under this URI")))
    dated = rows.join(F.broadcast(files), SOURCE_FILE, "left")
    return dated.withColumn(PATH_DAY, F.coalesce(PATH_DAY, unlisted))


def _unreadable_file_records(
    unreadable: Sequence[UnreadableFile], selected: list[str]
) -> DataFrame:
    """A record without content for each unreadable file, in one plan for any number of files."""
    rows = [{SOURCE_FILE: f.uri, READ_ERROR: f.reason, PATH_DAY: f.day} for f in unreadable]
    text, location_type = pa.string(), "struct<block: bigint, row: bigint>"
    schema = pa.schema([(SOURCE_FILE, text), (READ_ERROR, text), (PATH_DAY, pa.date32())])
    null = F.lit(None).cast("string")
    files = SparkSession.active().createDataFrame(pa.Table.from_pylist(rows, schema))
    return files.select(
        F.struct(*[null.alias(name) for name in selected]).alias("raw"),
        null.alias(PAYLOAD),
        SOURCE_FILE,
        F.lit(None).cast(location_type).alias(RECORD_LOCATION),
        READ_ERROR,
        PATH_DAY,
    )


_READERS = {"json": _read_json, "csv": _read_csv, "parquet": _read_parquet}


def with_line_numbers(rows: DataFrame) -> DataFrame:
    """`rows` with `line`, the number of each record in its file from 1; null for a whole file.

    `rows` must hold every record of the files. A Spark task reads the records of a block in order,
    so the line follows from the row number within the block and the sizes of the blocks before it.
    """
    blocks = rows.filter(f"{RECORD_LOCATION} IS NOT NULL").groupBy(
        SOURCE_FILE, f"{RECORD_LOCATION}.block"
    )
    bounds = blocks.agg(
        F.min(f"{RECORD_LOCATION}.row").alias("first"),
        F.max(f"{RECORD_LOCATION}.row").alias("last"),
    )
    blocks_before = (
        Window.partitionBy(SOURCE_FILE).orderBy("block").rowsBetween(Window.unboundedPreceding, -1)
    )
    size = F.col("last") - F.col("first") + 1
    rows_before = F.coalesce(F.sum(size).over(blocks_before), F.lit(0))
    offset = (F.col("first") - rows_before - 1).alias("offset")
    offsets = bounds.select(SOURCE_FILE, "block", offset)
    rows = rows.withColumn("block", F.col(f"{RECORD_LOCATION}.block"))
    rows = rows.join(F.broadcast(offsets), [SOURCE_FILE, "block"], "left")
    line = F.col(f"{RECORD_LOCATION}.row") - F.col("offset")
    return rows.withColumn("line", line).drop("block", "offset")
