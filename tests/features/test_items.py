"""Item indexes are consecutive, and do not depend on how Spark distributes the items."""

import random
from datetime import date, timedelta
from itertools import pairwise

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from features.items import number_items

pytestmark = pytest.mark.spark

FIRST_INDEX = 16


def test_items_are_numbered_by_day_and_popularity_whatever_their_partitions(
    spark: SparkSession,
) -> None:
    rng = random.Random(0)
    days = [date(2026, 1, 1) + timedelta(days=rng.randrange(3)) for _ in range(500)]
    counts = [1 + int(rng.paretovariate(0.7)) for _ in days]
    table = pa.table({"item_id": [f"i{i}" for i in range(500)], "day": days, "n": counts})
    items = spark.createDataFrame(table)
    numbered = number_items(items, FIRST_INDEX).collect()
    indexes = sorted(row["item_index"] for row in numbered)
    assert indexes == list(range(FIRST_INDEX, FIRST_INDEX + 500))
    again = number_items(items.repartition(7).sort("n"), FIRST_INDEX).collect()
    assert sorted(again) == sorted(numbered)
    by_id = dict(zip(table["item_id"].to_pylist(), counts, strict=True))
    in_order = sorted(numbered, key=lambda row: row["item_index"])
    keys = [(row["day"], -(by_id[row["item_id"]].bit_length())) for row in in_order]
    assert all(first <= second for first, second in pairwise(keys))
