"""Spark and Python agree on day bounds and on the time from which an event is visible."""

import random
from datetime import date, timedelta

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from etl.event_time import compute_visible_ts, day_end_sql, day_start_sql, visible_ts_sql
from etl.ingest.timestamps import local_date
from etl.spec import DataSpec
from etl.spec.units import MICROS, date_range

pytestmark = pytest.mark.spark

YEAR = list(date_range(date(2026, 1, 1), date(2026, 12, 31)))
ZONES = {  # and the seconds of their shortest and longest day
    "UTC": (86_400, 86_400),
    "Asia/Kathmandu": (86_400, 86_400),
    "America/New_York": (82_800, 90_000),
    "America/Santiago": (82_800, 90_000),  # its clocks change at midnight
}


@pytest.mark.parametrize("zone", ZONES)
def test_spark_and_python_agree_on_day_bounds(
    spark: SparkSession, lake_spec: DataSpec, zone: str
) -> None:
    spec = lake_spec.model_copy(update={"time_zone": zone})
    frame = spark.createDataFrame([(day,) for day in YEAR], "day date")
    first, last = F.expr(day_start_sql(spec)), F.expr(day_end_sql(spec)) - 1
    bounds = frame.select(
        "day", first, last, local_date(spec, first), local_date(spec, last)
    ).collect()
    for day, first_second, last_second, date_of_first, date_of_last in bounds:
        assert (first_second, last_second + 1) == (spec.day_start(day), spec.day_end(day)), day
        assert date_of_first == day == date_of_last
    lengths = [spec.day_start(day + timedelta(days=1)) - spec.day_start(day) for day in YEAR]
    assert (min(lengths), max(lengths)) == ZONES[zone]


@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
@pytest.mark.parametrize("delay", [0, 900])
def test_spark_and_python_agree_on_when_an_event_is_visible(
    spark: SparkSession, lake_spec: DataSpec, zone: str, delay: int
) -> None:
    spec = lake_spec.model_copy(update={"time_zone": zone})
    rng = random.Random(delay)
    events = []
    for day in rng.choices(YEAR, k=200):
        ingest_ts = spec.day_start(day) * MICROS["s"] + rng.randrange(-7200, 93_600) * 999_999
        events.append((day, ingest_ts + rng.randrange(-3600, 3600) * 1_000_001, ingest_ts))
    frame = spark.createDataFrame(events, "day date, event_ts bigint, ingest_ts bigint")
    rows = frame.withColumn("visible_ts", F.expr(visible_ts_sql(spec, delay))).collect()
    bounds_that_decide = set()
    for day, event_ts, ingest_ts, visible_ts in rows:
        day_start = spec.day_start(day)
        expected = compute_visible_ts(event_ts, ingest_ts, delay, day_start)
        assert visible_ts == expected
        times = (event_ts // MICROS["s"], ingest_ts // MICROS["s"] + delay, day_start)
        bounds_that_decide.add(times.index(expected))
    assert bounds_that_decide == {0, 1, 2}, "each of the three times decides for some event"
