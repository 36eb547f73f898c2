"""Tables as Spark DataFrames: read at a version, replace whole partitions."""

from collections.abc import Mapping

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from etl.tables.contract import Contract
from etl.tables.create import create
from etl.tables.lake import Lake, provenance


def bucket_of(user: Column, buckets: int) -> Column:
    """The bucket of a user id: the same in every table."""
    return F.pmod(F.xxhash64(user), F.lit(buckets)).cast("int")


def read(lake: Lake, contract: Contract, version: int | None = None) -> DataFrame:
    """A table at a version; raises UserError where it is missing or of another spec."""
    pinned = lake.open(contract.name, version).version()
    reader = SparkSession.active().read.format("delta").option("versionAsOf", pinned)
    return reader.load(lake.path(contract.name))


def replace(
    lake: Lake, contract: Contract, frame: DataFrame, where: str, inputs: Mapping[str, object]
) -> int:
    """Replace the partitions that `where` selects, in one commit; returns the new version.

    Rows of `frame` outside of `where` make the write fail. `inputs` are the versions of the
    tables read; they and the spec's hash go into the commit.
    """
    create(lake, contract)
    shaped = frame.select([F.col(n).cast(t).alias(n) for n, t in contract.columns.items()])
    shaped = shaped.repartition(*contract.partition_by)
    shaped = shaped.sortWithinPartitions(*contract.partition_by, *contract.order_by)
    (
        shaped.write.format("delta")
        .mode("overwrite")
        .option("replaceWhere", where)
        .option("userMetadata", provenance(spec=lake.spec.hash, inputs=dict(inputs)))
        .save(lake.path(contract.name))
    )
    return lake.version(contract.name)


def days_between(first: object, last: object) -> str:
    """A predicate on whole days, both included."""
    return f"day >= '{first}' AND day <= '{last}'"
