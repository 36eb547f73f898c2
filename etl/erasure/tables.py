"""Deletes the rows of users from the tables of a lake, by what their schemas declare."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from delta.tables import DeltaTable
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from etl.erasure.erased_users import payload_words
from etl.ingest.readers import PAYLOAD, parse_payload, raw_value
from etl.ingest.run import write_ingest_metrics
from etl.spec.model import DataSpec
from etl.spec.report_sources import AudienceLabelSource
from etl.spec.sources import AttributeSource, EventLogSource, ImpressionLogSource, Source
from etl.tables import schemas, spark_io
from etl.tables.lake import Lake, commit_metadata, last_commit_metadata
from etl.tables.table_schema import TableSchema

METADATA_SETTING = "spark.databricks.delta.commitInfo.userMetadata"
LAST_TABLES = ("impressions", "examples", "events")  # they name the impressions of a user


def erase_from_tables(lake: Lake, users: DataFrame, impressions: DataFrame) -> dict[str, int]:
    """Delete the rows of users (`user_id`) from all tables; returns the number of rows by table.

    Tables that name a user's impressions come last, so that an interrupted run can be repeated.
    `ingest_metrics` is counted again.
    """
    erased = {}
    for schema in _existing_tables(lake):
        keys = _keys(lake, schema, users, impressions)
        erased[schema.name] = delete_rows(lake, schema, keys)
    recount_ingest_metrics(lake)
    return erased


def impressions_of(lake: Lake, users: DataFrame) -> DataFrame:
    """The ids of all impressions of users: `impression_id`."""
    code = lake.spec.event_codes[lake.spec.impression_type]
    found = []
    for schema in _existing_tables(lake):
        if not {"user_id", "impression_id"} <= {*schema.columns}:
            continue
        rows = spark_io.read_table(lake, schema)
        if "event_id" in schema.columns:  # outcomes name impressions that may be of others
            rows = rows.filter(F.col("type") == code)
        found.append(rows.join(users, "user_id", "left_semi").select("impression_id"))
    if not found:
        return users.select(F.col("user_id").alias("impression_id")).limit(0)
    return functools.reduce(DataFrame.unionByName, found).distinct()


def _existing_tables(lake: Lake) -> list[TableSchema]:
    """Tables with rows of users that exist, in the order in which they are erased."""
    tables = [s for s in schemas.table_registry(lake.spec).values() if s.erased_by is not None]
    tables.sort(key=lambda schema: LAST_TABLES.index(schema.name) if schema.name in LAST_TABLES
                else -1)  # fmt: skip
    return [schema for schema in tables if lake.exists(schema.name)]


def _keys(lake: Lake, schema: TableSchema, users: DataFrame, impressions: DataFrame) -> DataFrame:
    """The values of the columns by which the rows of users are found in a table."""
    match schema.erased_by:
        case "sampled_user":
            return users.select(F.xxhash64("user_id").alias("sampled_user"))
        case "impression_id":
            return impressions
        case "payload":
            return payloads_of(lake, users)
        case _:
            return users


def delete_rows(lake: Lake, schema: TableSchema, keys: DataFrame) -> int:
    """Delete the rows that share the columns of `keys`, in one commit; returns how many.

    The commit keeps the metadata of the commit before it, which readers of the table rely on.
    """
    rows = spark_io.read_table(lake, schema).select(*keys.columns)
    found = rows.join(keys, keys.columns, "left_semi").count()
    if found:
        matches = " AND ".join(f"t.`{name}` = k.`{name}`" for name in keys.columns)
        table = DeltaTable.forPath(SparkSession.active(), lake.table_uri(schema.name))
        merge = table.alias("t").merge(keys.distinct().alias("k"), matches)
        with _commit_metadata(lake, schema):
            merge.whenMatchedDelete().execute()
    return found


@contextmanager
def _commit_metadata(lake: Lake, schema: TableSchema) -> Iterator[None]:
    """Commits in this context have the metadata of the table's last one."""
    spark = SparkSession.active()
    metadata = last_commit_metadata(lake.open(schema.name))
    spark.conf.set(METADATA_SETTING, commit_metadata(**metadata))
    try:
        yield
    finally:
        spark.conf.unset(METADATA_SETTING)


def payloads_of(lake: Lake, users: DataFrame) -> DataFrame:
    """The quarantined payloads of users: `payload`.

    A payload belongs to the user in the column that its source declares; one that cannot be parsed,
    and one of a source about something else, to each user whose id is a word of it.
    """
    quarantine = spark_io.read_table(lake, schemas.quarantine(lake.spec))
    quarantine = quarantine.filter(F.col(PAYLOAD).isNotNull()).select("log", PAYLOAD)
    words = quarantine.select(PAYLOAD, F.explode(payload_words(F.col(PAYLOAD))).alias("user_id"))
    found = [words.join(users, "user_id", "left_semi").select(PAYLOAD)]
    for name, column in user_columns(lake.spec).items():
        parsed = parse_payload(quarantine.filter(F.col("log") == name), [column])
        parsed = parsed.withColumn("user_id", raw_value(column))
        found.append(parsed.join(users, "user_id", "left_semi").select(PAYLOAD))
    return functools.reduce(DataFrame.unionByName, found).distinct()


def user_columns(spec: DataSpec) -> dict[str, str]:
    """The raw column with the user's id of each source that is about users."""
    named = {name: _user_column(source) for name, source in spec.sources.items()}
    return {name: column for name, column in named.items() if column}


def _user_column(source: Source) -> str | None:
    if isinstance(source, AttributeSource):
        return source.key if source.entity == "user" else None
    if isinstance(source, EventLogSource | ImpressionLogSource | AudienceLabelSource):
        return source.columns.user
    return None


def recount_ingest_metrics(lake: Lake) -> None:
    """Make the counts of `ingest_metrics` agree with the tables; duplicates stay as they were."""
    schema = schemas.ingest_metrics(lake.spec)
    if not lake.exists(schema.name):
        return
    rows = [
        _recounted(lake, row) for row in spark_io.read_table(lake, schema).orderBy("day").collect()
    ]
    write_ingest_metrics(lake, rows, (rows[0]["day"], rows[-1]["day"]))


def _recounted(lake: Lake, row: Row) -> dict[str, Any]:
    day = row["day"]
    counts = {
        "kept": lake.count_rows("events", (day, day)),
        "excluded": lake.count_rows("excluded_events", (day, day)),
        "quarantined": sum(
            lake.count_rows("quarantine", (day, day), log=log) for log in lake.spec.log_sources
        ),
        "duplicates": row["duplicates"],
    }
    return {"day": day, "read": sum(counts.values()), **counts}
