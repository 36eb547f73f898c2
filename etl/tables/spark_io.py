"""Tables as Spark DataFrames: read a version, cache rows, replace partitions in one commit."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from etl.tables.lake import Lake, commit_metadata, create_table
from etl.tables.table_schema import TableSchema


def user_bucket(user_id: Column, buckets: int) -> Column:
    """The bucket of a user id, which is the same in every table."""
    return F.pmod(F.xxhash64(user_id), F.lit(buckets)).cast("int")


def read_table(lake: Lake, schema: TableSchema, version: int | None = None) -> DataFrame:
    """A table at a version that `lake.version` has returned; by default at that version.

    Raises UserError if the table is missing or of another spec.
    """
    version = lake.version(schema.name) if version is None else version
    reader = SparkSession.active().read.format("delta").option("versionAsOf", version)
    return reader.load(lake.table_uri(schema.name))


@contextmanager
def cached(frame: DataFrame) -> Iterator[DataFrame]:
    """The rows of `frame`, which are computed once in the context.

    In local mode they are a local checkpoint, whose plan is one leaf: whatever is derived from it
    is planned without the plan of `frame`, and its rows are stored as they are. On a cluster they
    are persisted instead, so that those of a lost executor are computed again.
    """
    master = frame.sparkSession.sparkContext.master or ""
    if not master.startswith("local"):
        persisted = frame.persist(StorageLevel.MEMORY_AND_DISK)
        try:
            yield persisted
        finally:
            persisted.unpersist()
        return
    checkpoint = frame.localCheckpoint(eager=False)
    try:
        yield checkpoint
    finally:
        # A checkpoint is not in the cache of SQL, which DataFrame.unpersist releases.
        checkpoint._jdf.queryExecution().analyzed().rdd().unpersist(False)


def replace_partitions(
    lake: Lake,
    schema: TableSchema,
    frame: DataFrame,
    predicate: str,
    input_versions: Mapping[str, object],
) -> None:
    """Replace the partitions that `predicate` selects, in one commit; the table may be a new one.

    The commit records the spec's hash and `input_versions`, the versions of the tables that were
    read. See `overwrite`.
    """
    create_table(lake, schema)
    metadata = commit_metadata(spec=lake.spec.hash, inputs=dict(input_versions))
    overwrite(lake.table_uri(schema.name), schema, frame, predicate, metadata)


def overwrite(
    uri: str, schema: TableSchema, frame: DataFrame, predicate: str, metadata: str
) -> None:
    """Replace the partitions of an existing table that `predicate` selects, in one commit.

    Files are sized by bytes: Spark's adaptive execution splits large partitions into several tasks,
    and gives small ones to one (`spark.sql.adaptive.advisoryPartitionSizeInBytes`). The write fails
    if `frame` has rows that `predicate` does not select. The commit records `metadata`.
    """
    rows = frame.select([F.col(n).cast(t).alias(n) for n, t in schema.columns.items()])
    rows = rows.hint("rebalance", *schema.partition_by)
    rows = rows.sortWithinPartitions(*schema.partition_by, *schema.order_by)
    (
        rows.write.format("delta")
        .mode("overwrite")
        .option("replaceWhere", predicate)
        .option("userMetadata", metadata)
        .save(uri)
    )


def day_range_predicate(first: object, last: object) -> str:
    """SQL predicate that selects the days from first to last, both included."""
    return f"day >= '{first}' AND day <= '{last}'"
