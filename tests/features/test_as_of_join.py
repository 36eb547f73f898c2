"""The as-of join against a loop, on times with many ties."""

import numpy as np
import pytest
from pyspark.sql import SparkSession

from features.examples import asof_join

pytestmark = pytest.mark.spark


def test_each_row_gets_the_latest_row_of_its_key_strictly_before_it(spark: SparkSession) -> None:
    rng = np.random.default_rng(0)
    rows = [
        (int(key), int(ts), f"{key} at {ts}")
        for key in range(40)
        for ts in rng.choice(12, rng.integers(0, 6), replace=False)
    ]
    queries = [
        (int(key), int(ts), str(number))
        for number, (key, ts) in enumerate(rng.integers(0, (44, 14), (300, 2)))
    ]
    joined = asof_join(
        spark.createDataFrame(queries, "user long, ts long, impression_id string"),
        spark.createDataFrame(rows, "user long, ts long, value string"),
        "user",
        "ts",
    )
    values = {row["impression_id"]: row["value"] for row in joined.collect()}
    ties = 0
    for key, ts, number in queries:
        earlier = [row for row in rows if row[0] == key and row[1] < ts]
        expected = max(earlier, key=lambda row: row[1])[2] if earlier else None
        assert values[number] == expected
        ties += (key, ts) in {row[:2] for row in rows}
    assert len(values) == len(queries) and ties > 20
