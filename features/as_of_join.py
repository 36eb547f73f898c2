"""The as-of join: for each question the newest row of its key strictly before it.

A union and one window: each key's rows are sorted once. A range join would pair each question with
all earlier rows of its key first.
"""

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F


def last_before(asked: DataFrame, rows: DataFrame, key: str, ts: str) -> DataFrame:
    """`impression_id` and the last column of `rows`, null where there is no earlier row.

    `asked` has `key`, `ts` and impression_id; `rows` have `key`, `ts` and one more column.
    """
    (value,) = (name for name in rows.columns if name not in {key, ts})
    both = asked.unionByName(rows, allowMissingColumns=True)
    until_now = (
        Window.partitionBy(key)
        .orderBy(ts, F.asc_nulls_last("impression_id"))
        .rowsBetween(Window.unboundedPreceding, Window.currentRow)
    )
    found = both.withColumn(value, F.last(value, ignorenulls=True).over(until_now))
    return found.filter("impression_id IS NOT NULL").select("impression_id", value)
