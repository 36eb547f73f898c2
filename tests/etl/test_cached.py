"""Rows in the cache of a context are computed once, planned as a leaf, and released at its end."""

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from etl.tables import spark_io

pytestmark = pytest.mark.spark


def num_stored_rdds(session: SparkSession) -> int:
    return int(session.sparkContext._jsc.getPersistentRDDs().size())


def test_rows_are_computed_once_and_released(spark: SparkSession) -> None:
    stored_before = num_stored_rdds(spark)
    num_computed = spark.sparkContext.accumulator(0)

    @F.udf("bigint")
    def count_row(number: int) -> int:
        num_computed.add(1)
        return number

    with spark_io.cached(spark.range(100).select(count_row("id").alias("id"))) as rows:
        sums = [rows.agg(F.sum("id")).collect()[0][0] for _ in range(2)]
        assert num_stored_rdds(spark) == stored_before + 1
    assert sums == [4950, 4950]
    assert num_computed.value == 100
    assert num_stored_rdds(spark) == stored_before


def test_what_is_derived_is_planned_without_the_plan_of_the_rows(spark: SparkSession) -> None:
    rows = spark.range(10).select(F.expr("id * 31337").alias("product"))
    with spark_io.cached(rows) as kept:
        derived = kept.filter("product > 0").unionByName(kept)
        assert "31337" not in derived._jdf.queryExecution().optimizedPlan().toString()
        assert derived.count() == 19


def test_rows_are_released_after_an_error(spark: SparkSession) -> None:
    def fail() -> None:
        with spark_io.cached(spark.range(10)) as rows:
            rows.count()
            raise ZeroDivisionError

    stored_before = num_stored_rdds(spark)
    with pytest.raises(ZeroDivisionError):
        fail()
    assert num_stored_rdds(spark) == stored_before
