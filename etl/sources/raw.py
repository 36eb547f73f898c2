"""Raw records as they are: every column text, beside its payload, its file and its day."""

import functools
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from etl.errors import UserError
from etl.spec.sources import AttributeFile, EventLog, ImpressionLog
from etl.spec.units import each_day

PAYLOAD, FILE, DAY, CORRUPT = "payload", "source_file", "folder_day", "corrupt"
AnySource = EventLog | ImpressionLog | AttributeFile


def read_raw(
    raw: str, source: AnySource, columns: Iterable[str], days: tuple[date, date]
) -> DataFrame:
    """Records of a source: `raw`, a struct of `columns` as text, and where it comes from.

    `folder_day` is the day that the path names, null where it names none. Raises UserError where
    no file matches or a column is in no file.
    """
    wanted = sorted(set(columns))
    parts = [
        _READERS[source.format](paths, wanted, source.path).withColumn(DAY, F.lit(day).cast("date"))
        for day, paths in find_files(raw, source, days)
    ]
    return functools.reduce(DataFrame.unionByName, parts)


def raw_value(column: str) -> Column:
    """The text of a raw column, null where the record has none."""
    return F.col("raw").getField(column)


def find_files(
    raw: str, source: AnySource, days: tuple[date, date]
) -> list[tuple[date | None, list[str]]]:
    """Paths by the day that they name, or all under None; raises UserError where there are none."""
    if "://" not in raw and not Path(raw).is_dir():
        raise UserError(f"{raw}: no such folder of raw logs; name it with --raw")
    if "{day}" not in source.path:
        return [(None, _matches(raw, source.path))]
    return [(day, _matches(raw, source.path.replace("{day}", str(day)))) for day in each_day(*days)]


def _matches(raw: str, pattern: str) -> list[str]:
    if "://" in raw:
        return [f"{raw.rstrip('/')}/{pattern}"]
    found = [str(path) for path in sorted(Path(raw).glob(pattern)) if path.stat().st_size]
    if not found:
        raise UserError(
            f"{raw}/{pattern}: no such file, or only empty ones; check --raw and --days"
        )
    return found


def _read_json(paths: list[str], columns: list[str], _: str) -> DataFrame:
    fields = [StructField(name, StringType()) for name in [*columns, CORRUPT]]
    parsed = F.from_json("value", StructType(fields), {"columnNameOfCorruptRecord": CORRUPT})
    lines = SparkSession.active().read.text(paths).select("value", F.col("_metadata.file_path"))
    return lines.select(
        parsed.alias("raw"), F.col("value").alias(PAYLOAD), F.col("file_path").alias(FILE)
    ).withColumn(CORRUPT, F.col(f"raw.{CORRUPT}"))


def _read_csv(paths: list[str], columns: list[str], pattern: str) -> DataFrame:
    reader = SparkSession.active().read.option("header", True).option("enforceSchema", False)
    header = reader.csv(paths[:1]).columns
    schema = StructType([StructField(name, StringType()) for name in [*header, CORRUPT]])
    rows = reader.option("columnNameOfCorruptRecord", CORRUPT).schema(schema).csv(paths)
    return _from_table(rows, header, columns, pattern)


def _read_parquet(paths: list[str], columns: list[str], pattern: str) -> DataFrame:
    rows = SparkSession.active().read.parquet(*paths)
    names = rows.columns
    return _from_table(
        rows.withColumn(CORRUPT, F.lit(None).cast("string")), names, columns, pattern
    )


def _from_table(rows: DataFrame, have: list[str], columns: list[str], pattern: str) -> DataFrame:
    missing = [name for name in columns if name not in have]
    if missing:
        raise UserError(
            f"{pattern}: the spec names {', '.join(missing)}, which the file lacks; "
            f"it has {', '.join(have)}"
        )
    return rows.select(
        F.struct(*[F.col(f"`{n}`").cast("string").alias(n) for n in columns]).alias("raw"),
        F.to_json(F.struct(*[F.col(f"`{name}`") for name in have])).alias(PAYLOAD),
        F.col("_metadata.file_path").alias(FILE),
        CORRUPT,
    )


_READERS = {"json": _read_json, "csv": _read_csv, "parquet": _read_parquet}


@contextmanager
def readable() -> Iterator[None]:
    """Turn Spark's failure to read a raw file into a UserError that names the file."""
    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        found = re.search(
            r"\[FAILED_READ_FILE\S*\] Encountered error while reading file (\S+)", str(error)
        )
        if not found:
            raise
        path = found[1].rstrip(".")
        raise UserError(
            f"{path}: cannot be read to its end (a corrupt gzip, or another format or header than "
            "the spec tells?); fetch it again, or correct the spec"
        ) from None
