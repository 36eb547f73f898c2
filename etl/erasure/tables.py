"""Deletes the rows of users from the tables of a lake, by what their schemas declare."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date

from delta.tables import DeltaTable
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from etl.attribute_versions import build_version_snapshots
from etl.erasure.erased_users import payload_words
from etl.event_time import day_end_sql
from etl.ingest.readers import PAYLOAD, parse_quarantined, raw_value
from etl.ingest.run import count_stored_records, write_ingest_metrics
from etl.label_versions import build_label_snapshots
from etl.spec.model import DataSpec
from etl.spec.report_sources import AudienceLabelSource
from etl.spec.sections import RetainedTable
from etl.spec.sources import AttributeSource, EventLogSource, ImpressionLogSource, Source
from etl.tables import schemas, spark_io, user_schemas
from etl.tables.audience_schemas import audience_label_snapshots
from etl.tables.erased_versions import record_erasure
from etl.tables.lake import Lake, commit_metadata, last_commit_metadata
from etl.tables.maintenance import first_kept_days
from etl.tables.schemas import NO_DAY
from etl.tables.table_schema import TableSchema
from etl.tables.weekly_snapshots import remove_snapshots_from

METADATA_SETTING = "spark.databricks.delta.commitInfo.userMetadata"
LAST_TABLES = ("impressions", "examples", "events")  # they name the impressions of a user


@dataclass(frozen=True)
class ErasureScope:
    """Whose data is erased: that of `users` (`user_id`), all of it or what was known before a day.

    `impressions` (`impression_id`) are those of the users that are erased.
    """

    lake: Lake
    users: DataFrame
    impressions: DataFrame
    before: date | None

    @classmethod
    def of_users(cls, lake: Lake, users: DataFrame, before: date | None) -> "ErasureScope":
        """The scope of users, whose impressions are looked up in all tables and cached."""
        return cls(lake, users, find_impressions(lake, users, before).persist(), before)

    def keys(self, schema: TableSchema) -> DataFrame:
        """The values of the column by which the rows of the users are found in a table."""
        assert schema.user_rows
        if self.before is not None and schema.user_rows.known_second is None:
            return self.impressions
        match schema.user_rows.key:
            case "sampled_user":
                return self.users.select(F.xxhash64("user_id").alias("sampled_user"))
            case "impression_id":
                return self.impressions
            case "payload":
                return payloads_of(self.lake, self.users)
            case _:
                return self.users


def is_known_before(lake: Lake, schema: TableSchema, before: date | None) -> str:
    """SQL: a row of a table was known before a day; true without a day.

    Rows that become known with an impression are found by its id instead.
    """
    assert schema.user_rows
    if before is None or schema.user_rows.known_second is None:
        return "true"
    return f"({schema.user_rows.known_second}) < {lake.spec.day_start(before)}"


def find_impressions(lake: Lake, users: DataFrame, before: date | None) -> DataFrame:
    """The impressions of users (`impression_id`) that are erased, from all tables that name them.

    Those known before a day are found by their events.
    """
    code = lake.spec.event_codes[lake.spec.impression_type]
    found = [users.select(F.col("user_id").alias("impression_id")).limit(0)]
    for schema in tables_of_users(lake):
        assert schema.user_rows
        has_both = {"user_id", "impression_id"} <= {*schema.columns}
        if not has_both or (before is not None and schema.user_rows.known_second is None):
            continue
        rows = spark_io.read_table(lake, schema).filter(is_known_before(lake, schema, before))
        if "event_id" in schema.columns:  # outcomes name impressions that may be of others
            rows = rows.filter(F.col("type") == code)
        found.append(rows.join(users, "user_id", "left_semi").select("impression_id"))
    return functools.reduce(DataFrame.unionByName, found).distinct()


def erase_from_tables(scope: ErasureScope) -> dict[str, int]:
    """Delete the rows of users from all tables; returns the number of rows by table.

    Tables that name a user's impressions come last, so that an interrupted run can be repeated.
    Pointers of later examples and weekly snapshots are adjusted, `ingest_metrics` is counted again,
    and earlier versions of the tables can no longer be pinned or read as pinned ones.
    """
    lake = scope.lake
    erased = {schema.name: delete_rows(scope, schema) for schema in tables_of_users(lake)}
    if scope.before is not None and lake.exists("examples"):
        adjust_pointers(lake, scope.users)
    if scope.before is not None and lake.exists("user_event_counts"):
        adjust_event_counts(lake, scope.users)
    if scope.before is not None and lake.exists("attributes_user"):
        # They may lack a version that an erased one, valid from a later time, had superseded.
        remove_snapshots_from(lake, schemas.attribute_snapshots(lake.spec, "user"), scope.before)
        build_version_snapshots(lake, "user", scope.before)
    if scope.before is not None and lake.exists("audience_labels"):
        remove_snapshots_from(lake, audience_label_snapshots(lake.spec), scope.before)
        build_label_snapshots(lake, scope.before)
    recount_ingest_metrics(lake)
    record_erasure(lake, list(erased))
    return erased


def tables_of_users(lake: Lake) -> list[TableSchema]:
    """Tables with rows of users that exist, in the order in which they are erased."""
    tables = [s for s in schemas.table_registry(lake.spec).values() if s.user_rows is not None]
    tables.sort(key=lambda s: LAST_TABLES.index(s.name) if s.name in LAST_TABLES else -1)
    return [schema for schema in tables if lake.exists(schema.name)]


def delete_rows(scope: ErasureScope, schema: TableSchema) -> int:
    """Delete the users' rows of a table in one commit, if there are any; returns how many.

    The commit keeps the metadata of the table's last write.
    """
    lake, keys = scope.lake, scope.keys(schema)
    condition = is_known_before(lake, schema, scope.before)
    rows = spark_io.read_table(lake, schema).filter(condition)
    found = rows.join(keys, keys.columns, "left_semi").count()
    if found:
        matches = [f"t.`{name}` = k.`{name}`" for name in keys.columns]
        merge = _table(lake, schema).merge(
            keys.distinct().alias("k"), " AND ".join([*matches, condition])
        )
        with _commit_metadata(lake, schema):
            merge.whenMatchedDelete().execute()
    return found


def adjust_pointers(lake: Lake, users: DataFrame) -> None:
    """Compute `history_length` of users' remaining examples from their remaining events.

    A pointer is the number of the user's events that were visible before an example. The result
    depends only on the tables, so that it is the same however often this is done.
    """
    schema = schemas.examples(lake.spec)
    examples = spark_io.read_table(lake, schema).join(users, "user_id", "left_semi")
    key = ("user_id", "day", "impression_id")  # two days may have the same impression id
    queries = examples.select(*key, F.col("as_of_ts").alias("ts"))
    lengths = count_earlier_events(lake, users, queries).select(*key, "n")
    matches = " AND ".join(f"t.{name} = k.{name}" for name in key)
    merge = _table(lake, schema).merge(lengths.alias("k"), matches)
    with _commit_metadata(lake, schema):
        merge.whenMatchedUpdate(set={"history_length": "k.n"}).execute()


def adjust_event_counts(lake: Lake, users: DataFrame) -> None:
    """Count the remaining events of users in the snapshots of `user_event_counts` again."""
    schema = user_schemas.user_event_counts(lake.spec)
    counts = spark_io.read_table(lake, schema).join(users, "user_id", "left_semi")
    queries = counts.select("user_id", "day", F.expr(day_end_sql(lake.spec)).alias("ts"))
    counts = count_earlier_events(lake, users, queries).select("user_id", "day", "n")
    merge = _table(lake, schema).merge(counts.alias("k"), "t.user_id = k.user_id AND t.day = k.day")
    with _commit_metadata(lake, schema):
        merge.whenMatchedUpdate(set={"events": "k.n"}).execute()


def count_earlier_events(lake: Lake, users: DataFrame, queries: DataFrame) -> DataFrame:
    """Add `n` to queries (`user_id`, `ts`, ...): the user's events visible strictly before `ts`.

    One pass over the events of users: a join would pair each event with each query of its user.
    """
    events = spark_io.read_table(lake, schemas.events(lake.spec))
    events = events.select(
        "user_id", F.col("visible_ts").alias("ts"), F.lit(True).alias("is_event")
    )
    events = events.join(users, "user_id", "left_semi")
    rows = queries.unionByName(events, allowMissingColumns=True)
    earlier = Window.partitionBy("user_id").orderBy("ts")
    earlier = earlier.rangeBetween(Window.unboundedPreceding, -1)  # strictly before
    counted = rows.withColumn("n", F.count("is_event").over(earlier).cast("int"))
    return counted.filter("is_event IS NULL").drop("is_event")


def _table(lake: Lake, schema: TableSchema) -> DeltaTable:
    return DeltaTable.forPath(SparkSession.active(), lake.table_uri(schema.name)).alias("t")


@contextmanager
def _commit_metadata(lake: Lake, schema: TableSchema) -> Iterator[None]:
    """Commits in this context have the metadata of the table's last write."""
    spark = SparkSession.active()
    metadata = last_commit_metadata(lake.open(schema.name))
    spark.conf.set(METADATA_SETTING, commit_metadata(**metadata))
    try:
        yield
    finally:
        spark.conf.unset(METADATA_SETTING)


def payloads_of(lake: Lake, users: DataFrame) -> DataFrame:
    """The quarantined payloads of users: `payload`.

    A record belongs to the user in the column that its source declares; without such a column, or
    if no user can be read there, to each user whose id is a word of it.
    """
    quarantine = spark_io.read_table(lake, schemas.quarantine(lake.spec))
    quarantine = quarantine.filter(F.col(PAYLOAD).isNotNull()).select("log", PAYLOAD)
    columns = user_columns(lake.spec)
    parts = [quarantine.filter(~F.col("log").isin(list(columns))).select(PAYLOAD)]
    parts[0] = parts[0].withColumn("user_id", F.lit(None).cast("string"))
    for name, column in columns.items():
        of_source = quarantine.filter(F.col("log") == name)
        parsed = parse_quarantined(lake.spec.sources[name], of_source, [column])
        parts.append(parsed.select(PAYLOAD, raw_value(column).alias("user_id")))
    records = functools.reduce(DataFrame.unionByName, parts)
    words = F.when(F.col("user_id").isNull(), payload_words(F.col(PAYLOAD)))
    named = F.coalesce(words, F.array("user_id"))
    found = records.select(PAYLOAD, F.explode(named).alias("user_id"))
    return found.join(users, "user_id", "left_semi").select(PAYLOAD).distinct()


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
    """Make the counts of `ingest_metrics` agree with the tables.

    The number of duplicates stays as it was, and so does that of rows that have expired.
    """
    schema = schemas.ingest_metrics(lake.spec)
    if not lake.exists(schema.name):
        return
    stored_records = count_stored_records(lake)
    tables: dict[str, RetainedTable] = {"excluded": "excluded_events", "quarantined": "quarantine"}
    first_kept = first_kept_days(lake)
    rows = []
    for row in spark_io.read_table(lake, schema).orderBy("day").collect():
        counts = {name: by_day[row["day"]] for name, by_day in stored_records.items()}
        counts["duplicates"] = row["duplicates"]
        for name, table in tables.items():
            is_expired = NO_DAY < row["day"] < first_kept.get(table, NO_DAY)
            if is_expired and not counts[name]:
                counts[name] = row[name]
        rows.append({"day": row["day"], "read": sum(counts.values()), **counts})
    if rows:
        write_ingest_metrics(lake, rows, (rows[0]["day"], rows[-1]["day"]))
