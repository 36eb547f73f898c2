"""Delta tables as sources: their rows, and the files that a day has in them.

What a day has is read from the Delta log alone, without Spark; a table of a catalog is looked up by
Spark once.
"""

from datetime import date
from typing import Any

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
from etl.spec.units import date_range


def read_delta_table(source: Source, selection: RawSelection, day_column: str) -> DataFrame:
    """The rows of the selected days, or all of them, with their day of landing in `day_column`.

    Raises:
        UserError: If there is no such table or partition column, or a day has no rows and the
            source is not optional.
    """
    table = _open(source, selection.root)
    if not source.optional:
        _check_days_exist(source, _data_files(source, table), selection.days)
    # The version whose files were listed, whatever is written meanwhile.
    reader = SparkSession.active().read.format("delta").option("versionAsOf", table.version())
    rows = reader.table(source.table) if source.table else reader.load(table.table_uri)
    if source.partition_column is None:
        return rows.withColumn(day_column, F.lit(None).cast("date"))
    rows = rows.withColumn(day_column, F.col(source.partition_column).try_cast("date"))
    return rows.filter(F.col(day_column).between(*map(F.lit, selection.days)))


def delta_file_states(source: Source, raw: str, day: date) -> dict[str, tuple[int, int]]:
    """Size and time of the last change (ns) of the data files of a day, or of the whole table."""
    files = _data_files(source, _open(source, raw))
    if source.partition_column is not None:
        files = files.filter(pc.equal(files["day"], pa.scalar(day)))
    paths, sizes, changed = (files[name].to_pylist() for name in ("path", "size", "changed_ms"))
    states = zip(sizes, (ms * 1_000_000 for ms in changed), strict=True)
    return dict(zip(paths, states, strict=True))


def latest_delta_day(source: Source, raw: str) -> date | None:
    """The latest day that has rows in a table with a partition column."""
    latest: date | None = pc.max(_data_files(source, _open(source, raw))["day"]).as_py()
    return latest


def _check_days_exist(source: Source, files: pa.Table, days: tuple[date, date]) -> None:
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


def _open(source: Source, raw: str) -> DeltaTable:
    """The latest version of a table."""
    uri = _table_uri(source, raw)
    try:
        return DeltaTable(uri)
    except DeltaError as error:
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
        files["day"] = _as_days(actions[f"partition.{source.partition_column}"])
    return pa.table(files)


def _as_days(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Dates, or texts such as 2026-01-31; null for any other text."""
    if not pa.types.is_date(column.type):
        column = pc.strptime(column.cast(pa.string()), "%Y-%m-%d", unit="s", error_is_null=True)
    return column.cast(pa.date32())


def _table_uri(source: Source, raw: str) -> str:
    """The folder or URL of a table."""
    if source.table is None:
        return f"{absolute_root(raw)}/{source.location}"
    try:
        details: Any = spark_session("gemline").sql(f"DESCRIBE DETAIL {source.table}").first()
    except AnalysisException as error:
        raise UserError(
            f"{source.table} is no Delta table of the catalog: {error.getMessage()}"
        ) from None
    return normalize_uri(details["location"])
