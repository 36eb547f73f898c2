from datetime import date, timedelta

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from etl.clock import day_end, day_start
from etl.local_time import day_of
from etl.spec import DataSpec
from etl.spec.units import each_day

pytestmark = pytest.mark.spark

YEAR = list(each_day(date(2026, 1, 1), date(2026, 12, 31)))
ZONES = {  # with the seconds of their shortest and longest day
    "UTC": (86_400, 86_400),
    "Asia/Kathmandu": (86_400, 86_400),
    "America/New_York": (82_800, 90_000),
    "America/Santiago": (82_800, 90_000),  # its clocks change at midnight
}


@pytest.mark.parametrize("zone", ZONES)
def test_spark_and_python_agree_when_a_day_begins_and_ends(
    spark: SparkSession, lake_spec: DataSpec, zone: str
) -> None:
    spec = lake_spec.model_copy(update={"time_zone": zone})
    frame = spark.createDataFrame([(day,) for day in YEAR], "day date")
    first, last = F.expr(day_start(spec)), F.expr(day_end(spec)) - 1
    told = frame.select("day", first, last, day_of(spec, first), day_of(spec, last)).collect()
    for day, begins, ends, at_first, at_last in told:
        assert (begins, ends + 1) == (spec.day_start(day), spec.day_end(day)), day
        assert at_first == day == at_last
    lengths = [spec.day_start(day + timedelta(days=1)) - spec.day_start(day) for day in YEAR]
    assert (min(lengths), max(lengths)) == ZONES[zone]
