"""Raw records as they are: every column text; beside it where it stands, and what is amiss."""

import functools
from collections.abc import Collection, Iterable, Mapping
from datetime import date

import pyarrow as pa
from pyspark.sql import Column, DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from etl.errors import UserError
from etl.sources.shapes import AnySource, BadFile, Group, groups
from etl.sources.storage import LOCAL

PAYLOAD, FILE, DAY, FAULT = "payload", "source_file", "folder_day", "fault"
PLACE = "place"  # the block of its file, and the row within the task that read it
CORRUPT, NOT_A_RECORD, TOO_LONG = "corrupt", "not a record", "longer than a record can be"
LONGEST = 1_000_000  # characters


def read_raw(
    raw: str,
    source: AnySource,
    columns: Iterable[str],
    days: tuple[date, date],
    needed: Collection[str] = (),
    damaged: Collection[str] = (),
) -> DataFrame:
    """Records of a source: `raw`, a struct of `columns` as text, and where it comes from.

    `folder_day` is the day that the path names, null where it names none. `fault` tells what is
    amiss with a record as such, or with its file: one that is empty, that lacks a `needed` column,
    or whose address is among the `damaged` (of which is read what can be). Raises UserError where
    no file matches (unless the source is sparse), or no file has a column.
    """
    wanted = sorted(set(columns))
    found, bad = groups(raw, source, days, damaged)
    _refuse_unknown(source, found, wanted)
    parts = [_READERS[source.format](group, wanted, needed) for group in found]
    parts += [_of_file(file, wanted) for file in bad]
    return functools.reduce(DataFrame.unionByName, parts or [_nothing(wanted)])


def raw_value(column: str) -> Column:
    """The text of a raw column, null where the record has none."""
    return F.col("raw").getField(column)


def from_payload(rows: DataFrame, columns: list[str]) -> DataFrame:
    """`rows` with `raw` and `fault`, read from the JSON of their payload."""
    fields = [StructField(name, StringType()) for name in [*columns, CORRUPT]]
    short = F.when(F.length(PAYLOAD) <= LONGEST, F.col(PAYLOAD))
    parsed = F.from_json(short, StructType(fields), {"columnNameOfCorruptRecord": CORRUPT})
    bad = F.col(f"raw.{CORRUPT}").isNotNull() | F.col("raw").isNull()
    too_long = F.when(F.length(PAYLOAD) > LONGEST, F.lit(TOO_LONG))
    fault = F.coalesce(too_long, F.when(bad, F.lit(NOT_A_RECORD)))
    rows = rows.withColumn("raw", parsed).withColumn(FAULT, fault)
    return rows.withColumn("raw", F.col("raw").dropFields(CORRUPT))


def _refuse_unknown(source: AnySource, found: list[Group], wanted: list[str]) -> None:
    have = [group.columns for group in found]
    if not have or None in have:
        return
    every = list(dict.fromkeys(name for columns in have for name in columns or ()))
    missing = [name for name in wanted if name not in every]
    if missing:
        raise UserError(
            f"{source.path}: the spec names {', '.join(missing)}, which the file lacks; "
            f"it has {', '.join(every)}"
        )


def _reader(group: Group) -> DataFrameReader:
    return SparkSession.active().read.option("ignoreCorruptFiles", group.damaged)


def _read_json(group: Group, wanted: list[str], _: Collection[str]) -> DataFrame:
    lines = (
        _reader(group).text(list(group.paths)).select(F.col("value").alias(PAYLOAD), "_metadata")
    )
    return _placed(from_payload(lines, wanted), group, F.col(FAULT))


def _read_csv(group: Group, wanted: list[str], needed: Collection[str]) -> DataFrame:
    schema = StructType([StructField(n, StringType()) for n in [*(group.columns or ()), CORRUPT]])
    reader = _reader(group).option("header", True).option("columnNameOfCorruptRecord", CORRUPT)
    rows = reader.schema(schema).csv(list(group.paths))
    bad = F.when(F.col(CORRUPT).isNotNull(), F.lit(NOT_A_RECORD))
    return _from_table(rows, group, wanted, needed, bad)


def _read_parquet(group: Group, wanted: list[str], needed: Collection[str]) -> DataFrame:
    rows = _reader(group).parquet(*group.paths)
    return _from_table(rows, group, wanted, needed, F.lit(None).cast("string"))


def _from_table(
    rows: DataFrame, group: Group, wanted: list[str], needed: Collection[str], bad: Column
) -> DataFrame:
    have = group.columns or ()
    texts = {n: F.col(f"`{n}`").cast("string") for n in have if n in wanted}
    nothing = F.lit(None).cast("string")
    lacking = [name for name in needed if name not in have]
    drift = F.lit(f"file lacks {', '.join(lacking)}" if lacking else None).cast("string")
    rows = rows.select(
        F.struct(*[texts.get(name, nothing).alias(name) for name in wanted]).alias("raw"),
        F.to_json(F.struct(*[F.col(f"`{name}`") for name in have])).alias(PAYLOAD),
        bad.alias("bad"),
        "_metadata",
    )
    return _placed(rows, group, F.coalesce(drift, "bad"))


def _placed(rows: DataFrame, group: Group, fault: Column) -> DataFrame:
    place = F.struct(
        F.col("_metadata.file_block_start").alias("block"),
        F.monotonically_increasing_id().alias("row"),
    )
    rows = rows.select(
        "raw",
        PAYLOAD,
        F.regexp_replace("_metadata.file_path", *LOCAL).alias(FILE),
        place.alias(PLACE),
        fault.alias(FAULT),
    )
    return _dated(rows, group.days)


def _dated(rows: DataFrame, days: Mapping[str, date]) -> DataFrame:
    """`rows` with the days of their files, by address: one plan for any number of days.

    A file that was listed under another address than Spark tells fails the read: without its day
    it would go on as one whose path tells none.
    """
    if not days:
        return rows.withColumn(DAY, F.lit(None).cast("date"))
    known = pa.table({FILE: list(days), DAY: list(days.values())})
    files = SparkSession.active().createDataFrame(known)
    unlisted = F.raise_error(F.concat(FILE, F.lit(" was not listed under this address")))
    dated = rows.join(F.broadcast(files), FILE, "left")
    return dated.withColumn(DAY, F.coalesce(DAY, unlisted))


def _nothing(wanted: list[str]) -> DataFrame:
    return _of_file(BadFile("", None, ""), wanted).limit(0)


def _of_file(file: BadFile, wanted: list[str]) -> DataFrame:
    """A file that cannot be read to its end, as one record with no content."""
    texts = [F.lit(None).cast("string").alias(name) for name in wanted]
    place = F.struct(F.lit(0).cast("bigint").alias("block"), F.lit(0).cast("bigint").alias("row"))
    return (
        SparkSession.active()
        .range(1)
        .select(
            F.struct(*texts).alias("raw"),
            F.lit(None).cast("string").alias(PAYLOAD),
            F.lit(file.address).alias(FILE),
            F.when(F.lit(False), place).alias(PLACE),
            F.lit(file.why).alias(FAULT),
            F.lit(file.day).cast("date").alias(DAY),
        )
    )


_READERS = {"json": _read_json, "csv": _read_csv, "parquet": _read_parquet}
