"""Delta tables as sources: their rows, and the files that a day has in them.

What a day has is read from the Delta log alone, without Spark; a table of a catalog is looked up by
Spark once.
"""

from datetime import date
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from etl.errors import UserError
from etl.ingest.file_discovery import RawSelection, absolute_root, normalize_uri
from etl.runtime.spark import spark_session
from etl.spec.sources import Source
from etl.spec.units import DayRange, date_range


def read_delta_table(source: Source, selection: RawSelection, day_column: str) -> DataFrame | None:
    """The rows of the selected days, or all of them, with their day of landing in `day_column`.

    None if there is no table yet and the source is optional.

    Raises:
        UserError: If there is no such table or partition column, or a day has no rows and the
            source is not optional.
    """
    uri = _table_uri(source, selection.root)
    if uri is None or (source.optional and not DeltaTable.is_deltatable(uri)):
        return None
    table = _open(uri)
    if not source.optional:
        _check_days_exist(source, _data_files(source, table), selection.days)
    # The version whose files were listed, whatever is written meanwhile.
    reader = SparkSession.active().read.format("delta").option("versionAsOf", table.version())
    rows = reader.table(source.table) if source.table else reader.load(uri)
    if source.partition_column is None:
        return rows.withColumn(day_column, F.lit(None).cast("date"))
    rows = rows.withColumn(day_column, F.col(source.partition_column).try_cast("date"))
    return rows.filter(F.col(day_column).between(*map(F.lit, selection.days)))


def delta_file_states(source: Source, raw: str, days: DayRange) -> dict[str, tuple[int, int]]:
    """Size and time of the last change (ns) of the data files of some days, by path.

    Those of the whole table if it has no partition column; none if there is no table yet.
    """
    files = _existing_data_files(source, raw)
    if files is None:
        return {}
    if source.partition_column is not None:
        day = files["day"]
        files = files.filter(pc.and_(pc.greater_equal(day, days[0]), pc.less_equal(day, days[1])))
    paths, sizes, changed = (files[name].to_pylist() for name in ("path", "size", "changed_ms"))
    states = zip(sizes, (ms * 1_000_000 for ms in changed), strict=True)
    return dict(zip(paths, states, strict=True))


def latest_delta_day(source: Source, raw: str) -> date | None:
    """The latest day that has rows in a table with a partition column; None without a table."""
    files = _existing_data_files(source, raw)
    latest: date | None = None if files is None else pc.max(files["day"]).as_py()
    return latest


def _existing_data_files(source: Source, raw: str) -> pa.Table | None:
    """The files of the latest version; None if there is no table yet."""
    uri = _table_uri(source, raw)
    if uri is None or not DeltaTable.is_deltatable(uri):
        return None
    return _data_files(source, _open(uri))


def _check_days_exist(source: Source, files: pa.Table, days: DayRange) -> None:
    if source.partition_column is None:
        existing = set(date_range(*days)) if len(files) else set()
    else:
        existing = set(files["day"].to_pylist())
    missing = [day for day in date_range(*days) if day not in existing]
    if missing:
        raise UserError(
            f"the Delta table {source.location} has no rows of {missing[0]}; check --raw and "
            "--days (or set `optional: true` in the spec for a source that lacks rows on some days)"
        )


def _open(uri: str) -> DeltaTable:
    """The latest version of a table."""
    try:
        return DeltaTable(uri)
    except (DeltaError, OSError) as error:
        raise UserError(f"{uri} cannot be read as a Delta table: {error}") from None


def _data_files(source: Source, table: DeltaTable) -> pa.Table:
    """`path`, `size`, `changed_ms` and, with a partition column, `day` of the files of a table."""
    actions = pa.table(table.get_add_actions(flatten=True))
    files = {
        "path": actions["path"],
        "size": actions["size_bytes"],
        "changed_ms": actions["modification_time"].cast(pa.int64()),
    }
    if source.partition_column is not None:
        partitions = table.metadata().partition_columns
        if source.partition_column not in partitions:
            raise UserError(
                f"{source.partition_column} is no partition column of {source.location}; it is "
                f"partitioned by {', '.join(partitions) or 'nothing'}: correct `partition_column`"
            )
        files["day"] = _as_days(source, actions[f"partition.{source.partition_column}"])
    return pa.table(files)


def _as_days(source: Source, column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The days of partitions, dates or texts such as 2026-01-31; UserError for any other value."""
    if column.null_count:
        raise UserError(
            f"{source.location} has rows without a value of its partition column "
            f"{source.partition_column}, which are of no day: give them one, or delete them"
        )
    if pa.types.is_date(column.type):
        return column.cast(pa.date32())
    texts = column.cast(pa.string())
    days = pc.strptime(texts, "%Y-%m-%d", unit="s", error_is_null=True)
    is_day = pc.match_substring_regex(texts, r"^\d{4}-\d\d-\d\d$")
    others = texts.filter(pc.invert(pc.and_kleene(is_day, days.is_valid())))
    if len(others):
        raise UserError(
            f"{source.location} has the partition {source.partition_column}={others[0]}, which is "
            "no day such as 2026-01-31: name another `partition_column`"
        )
    return days.cast(pa.date32())


def _table_uri(source: Source, raw: str) -> str | None:
    """The folder or URL of a table; None if an optional one is not in the catalog yet."""
    if source.table is None:
        return f"{absolute_root(raw)}/{source.location}"
    spark = spark_session("gemline")
    if source.optional and not spark.catalog.tableExists(source.table):
        return None
    try:
        details: Any = spark.sql(f"DESCRIBE DETAIL {source.table}").first()
    except AnalysisException as error:
        raise UserError(
            f"{source.table} is no Delta table of the catalog: {error.getMessage()}"
        ) from None
    return unquote(normalize_uri(details["location"]))
