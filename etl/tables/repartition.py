"""Rewrites tables that are partitioned by users for another number of `buckets`.

A table cannot be opened while it is rewritten: its rows would be looked for in buckets where they
are not. If that is interrupted, `gemline upgrade` rewrites the table again.
"""

from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from etl.tables import schemas, spark_io
from etl.tables.lake import REPARTITIONING, Lake, commit_metadata, last_commit_metadata
from etl.tables.maintenance import set_spec_hash
from etl.tables.table_schema import TableSchema


def repartition_table(lake: Lake, name: str) -> int:
    """Rewrite a table of an older spec in the buckets of the spec of `lake`; returns its rows.

    Tables that name no user follow the examples, which must have been rewritten before; rows whose
    example has expired are dropped, because nothing reads them.
    """
    schema = schemas.table_schema(lake.spec, name)
    uri = lake.table_uri(name)
    metadata = last_commit_metadata(DeltaTable(uri)) | {"spec": lake.spec.hash}
    set_spec_hash(lake, name, REPARTITIONING)
    rows = SparkSession.active().read.format("delta").load(uri)
    rows = with_buckets(lake, schema, rows)
    spark_io.overwrite(uri, schema, rows, "true", commit_metadata(**metadata))
    set_spec_hash(lake, name, lake.spec.hash)
    return lake.count_rows(name)


def with_buckets(lake: Lake, schema: TableSchema, rows: DataFrame) -> DataFrame:
    """Rows of a table with their buckets under the spec of `lake`."""
    rows = rows.drop("bucket")
    if "user_id" in schema.columns:
        bucket = spark_io.user_bucket(F.col("user_id"), lake.spec.buckets)
        return rows.withColumn("bucket", bucket)
    examples = spark_io.read_table(lake, schemas.examples(lake.spec))
    return rows.join(examples.select("day", "impression_id", "bucket"), ["day", "impression_id"])
