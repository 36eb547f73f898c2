"""The as-of join against a loop, on times that often tie."""

import numpy as np
import pytest
from pyspark.sql import SparkSession

from features.as_of_join import last_before

pytestmark = pytest.mark.spark


def test_each_question_gets_the_newest_row_strictly_before_it(spark: SparkSession) -> None:
    rng = np.random.default_rng(0)
    told = [
        (int(key), int(ts), f"{key} at {ts}")
        for key in range(40)
        for ts in rng.choice(12, rng.integers(0, 6), replace=False)
    ]
    asked = [
        (int(key), int(ts), str(number))
        for number, (key, ts) in enumerate(rng.integers(0, (44, 14), (300, 2)))
    ]
    found = last_before(
        spark.createDataFrame(asked, "user long, ts long, impression_id string"),
        spark.createDataFrame(told, "user long, ts long, value string"),
        "user",
        "ts",
    )
    answers = {row["impression_id"]: row["value"] for row in found.collect()}
    ties = 0
    for key, ts, number in asked:
        before = [row for row in told if row[0] == key and row[1] < ts]
        assert answers[number] == (max(before, key=lambda row: row[1])[2] if before else None)
        ties += (key, ts) in {row[:2] for row in told}
    assert len(answers) == len(asked) and ties > 20
