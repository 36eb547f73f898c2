"""Where a raw record stands: its line, and its file where that cannot be read."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from etl.errors import UserError
from etl.sources.raw import FILE, PLACE
from etl.sources.storage import one_form


def with_lines(rows: DataFrame) -> DataFrame:
    """`rows` with `line`, the number of each record in its file, from 1; null for a whole file.

    `rows` hold every record of the files. A task reads the records of a block one after another,
    so a block's first row and its number of rows tell where each stands.
    """
    blocks = rows.filter(f"{PLACE} IS NOT NULL").groupBy(FILE, f"{PLACE}.block")
    sizes = blocks.agg(F.min(f"{PLACE}.row").alias("first"), F.max(f"{PLACE}.row").alias("last"))
    before = Window.partitionBy(FILE).orderBy("block").rowsBetween(Window.unboundedPreceding, -1)
    earlier = F.coalesce(F.sum(F.col("last") - F.col("first") + 1).over(before), F.lit(0))
    starts = sizes.select(FILE, "block", (F.col("first") - earlier - 1).alias("zero"))
    rows = rows.withColumn("block", F.col(f"{PLACE}.block"))
    rows = rows.join(F.broadcast(starts), [FILE, "block"], "left")
    return rows.withColumn("line", F.col(f"{PLACE}.row") - F.col("zero")).drop("block", "zero")


@contextmanager
def naming_files() -> Iterator[None]:
    """Turn Spark's failure to read a raw file into a BadFileError that names the file."""
    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        found = re.search(
            r"\[FAILED_READ_FILE\S*\] Encountered error while reading file (\S+)", str(error)
        )
        if not found:
            raise
        raise BadFileError(one_form(found[1].rstrip("."))) from None


class BadFileError(UserError):
    """A raw file that cannot be read to its end; `address` names it."""

    def __init__(self, address: str) -> None:
        super().__init__(
            f"{address}: cannot be read to its end (a corrupt gzip, or another format or header "
            "than the spec tells?); fetch it again, or correct the spec"
        )
        self.address = address
