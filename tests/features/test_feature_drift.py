"""Statistics of features against a loop over rows, and which days raise an alarm."""

import math
from collections import Counter
from collections.abc import Sequence
from datetime import date, timedelta
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from etl.spec import DataSpec
from etl.tables import arrow, schemas
from etl.tables.declared_columns import counter_columns
from etl.tables.lake import Lake
from features.drift import (
    FeatureDrift,
    Histogram,
    compare_histograms,
    population_stability_index,
)
from features.feature_statistics import (
    BIN_RATIO,
    MISSING_BIN,
    FeatureColumns,
    build_statistics,
    number_bins,
    statistics_of,
)
from gemline import main
from tests.features.histograms import histogram_of, write_statistics
from tests.pipeline import rows

pytestmark = pytest.mark.spark

FIRST = date(2026, 1, 1)
numbers = st.floats(-1e30, 1e30, allow_nan=False)


NAME = ("ctx_x", "feed")


def drift_of(day: npt.ArrayLike, earlier: Sequence[npt.ArrayLike]) -> FeatureDrift:
    return compare_histograms(NAME, histogram_of(day), [*map(histogram_of, earlier)])


def test_statistics_equal_a_loop_over_rows(spark: SparkSession) -> None:
    """With several surfaces and days, in any order, and with missing values."""
    rng, size = np.random.default_rng(0), 700
    table = pa.table(
        {
            "day": pa.array([FIRST + timedelta(days=int(n)) for n in rng.integers(0, 3, size)]),
            "surface": pa.array(
                rng.integers(0, 2, size).astype(np.int8), mask=rng.random(size) < 0.2
            ),
            "code": pa.array(
                rng.integers(0, 5, size).astype(np.int32), mask=rng.random(size) < 0.1
            ),
            "number": pa.array(rng.normal(size=size), mask=rng.random(size) < 0.3),
            "count": pa.array(rng.poisson(2, size).astype(np.int32)),
            "vector": pa.array(
                [None if rng.random() < 0.2 else rng.normal(size=3).tolist() for _ in range(size)],
                pa.list_(pa.float32()),
            ),
            "bag": pa.array(
                [None if n == 0 else [n - 1, 3][: n - 1] for n in rng.integers(0, 4, size)],
                pa.list_(pa.int32()),
            ),
        }
    )
    columns = FeatureColumns(("code",), ("number", "count"), ("vector",), ("bag",))
    frame = spark.createDataFrame(table).repartition(5)
    stored = {
        (row["day"], row["surface"], row["feature"]): row
        for row in statistics_of(frame, columns).toArrow().to_pylist()
    }
    groups = {(row["day"], row["surface"]) for row in table.to_pylist()}
    assert stored.keys() == {(*group, name) for group in groups for name in columns.names}
    for (day, surface, name), row in stored.items():
        of_group = [r for r in table.to_pylist() if (r["day"], r["surface"]) == (day, surface)]
        values = [r[name] for r in of_group if r[name] is not None]
        if name == "bag":  # each value counts in its bin
            values = [value for value in values if value]
            expected = Counter(number for value in values for number in value)
            assert row["least"] is row["greatest"] is None
        elif name == "code":
            values = [value for value in values if value]
            expected = Counter(values)
            assert row["least"] is row["greatest"] is None
        else:
            lengths = [math.hypot(*v) if name == "vector" else float(v) for v in values]
            expected = Counter(number_bins(np.array(lengths)).tolist())
            assert row["least"] == pytest.approx(min(lengths), rel=1e-6)
            assert row["greatest"] == pytest.approx(max(lengths), rel=1e-6)
        assert row["num_rows"] == len(of_group)
        assert row["num_missing"] == len(of_group) - len(values)
        assert dict(zip(row["bins"], row["counts"], strict=True)) == expected
        assert all(a >= b for a, b in pairwise(row["counts"]))


@given(st.lists(numbers, min_size=2))
def test_bins_are_ordered_as_numbers_and_a_tenth_wide(values: list[float]) -> None:
    bins = number_bins(np.array(values))
    for (x, of_x), (y, of_y) in pairwise(sorted(zip(values, bins.tolist(), strict=True))):
        assert of_x <= of_y
        if of_x == of_y != 0:
            assert max(x / y, y / x) <= BIN_RATIO * (1 + 1e-9)
    assert number_bins(np.array([np.nan])).tolist() == [MISSING_BIN]
    assert number_bins(-np.array(values)).tolist() == (-bins).tolist()


def test_the_stability_index_of_two_shares() -> None:
    """Of halves that become 80 % and 20 %: 0.3 ln(1.6) - 0.3 ln(0.4)."""
    half, more = histogram_of([1, 2] * 10**6), histogram_of([1, 1, 1, 1, 2] * 10**5)
    expected = 0.3 * math.log(1.6) - 0.3 * math.log(0.4)
    assert population_stability_index(half, more) == pytest.approx(expected, rel=1e-4)
    assert population_stability_index(half, histogram_of([1, 2] * 50)) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_days_of_one_distribution_raise_no_alarm(seed: int) -> None:
    """Also where a feature is the same all day, such as a weekday, or is almost always the same."""
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(30, 0.3))
    for day in range(4, 16):
        days = [rng.choice(30, 600, p=shares) for _ in range(day + 1)]
        weekdays = [np.full(600, 1 + n % 7) for n in range(day + 1)]
        rare = [1 + (rng.random(600) < 0.003) for _ in range(day + 1)]
        for values in (days, rare, weekdays):
            drift = drift_of(values[-1], values[:-1])
            assert drift.alarm is None and drift.psi is not None


def test_a_feature_that_becomes_null_constant_or_other_raises_an_alarm() -> None:
    rng = np.random.default_rng(0)
    usual = [rng.integers(1, 5, 800) for _ in range(6)]
    null = drift_of(np.zeros(800, int), usual)
    assert null.is_broken and null.alarm and null.alarm.startswith("null in 100.0% of rows")
    constant = drift_of(np.full(800, 3), usual)
    assert constant.is_broken and constant.alarm and constant.alarm.startswith("constant")
    other = drift_of(rng.choice(4, 800, p=[0.7, 0.1, 0.1, 0.1]) + 1, usual)
    assert not other.is_broken and other.alarm and other.alarm.startswith("changed")
    unseen = drift_of(np.where(rng.random(800) < 0.3, 9, usual[0]), usual)
    assert unseen.unseen_share == pytest.approx(0.3, abs=0.05) and unseen.alarm
    few = drift_of(np.zeros(20, int), usual)
    assert few.alarm is None and few.psi is None
    new = drift_of(np.zeros(800, int), usual[:3])
    assert new.alarm is None and new.psi is None


def test_several_values_that_become_null_raise_an_alarm() -> None:
    """Rows are counted once, however many values they have."""
    rng = np.random.default_rng(0)
    bins = np.arange(1, 6)
    usual = [Histogram(800, 0, 5, bins, rng.integers(2800, 3600, 5)) for _ in range(6)]
    null = Histogram(800, 797, 5, bins, np.full(5, 20))  # three rows with many values
    drift = compare_histograms(NAME, null, usual)
    assert drift.is_broken and drift.alarm and drift.alarm.startswith("null in 99.6% of rows")
    steady = Histogram(800, 0, 5, bins, rng.integers(2800, 3600, 5))
    assert compare_histograms(NAME, steady, usual).alarm is None
    constant = Histogram(800, 0, 1, bins[:1], np.array([800]))
    assert compare_histograms(NAME, constant, usual).is_broken


def test_a_feature_that_stays_broken_keeps_its_alarm() -> None:
    """Until it was so on half of the earlier days."""
    rng = np.random.default_rng(0)
    usual, null, constant = ([rng.integers(1, 5, 800)] * 8, np.zeros(800, int), np.full(800, 3))
    for broken in (null, constant):
        for days in range(8):
            assert drift_of(broken, [*usual, *[broken] * days]).is_broken
        assert not drift_of(broken, [*usual, *[broken] * 10]).is_broken


def test_many_versions_of_items_are_compared_with_days_that_have_few() -> None:
    rng = np.random.default_rng(0)
    usual = [rng.integers(1, 9, 200) for _ in range(8)]
    assert drift_of(rng.integers(1, 9, 5000), usual).alarm is None
    assert drift_of(np.full(5000, 3), usual).is_broken


def test_values_that_were_always_missing_raise_no_alarm() -> None:
    assert drift_of(np.zeros(800, int), [np.zeros(800, int)] * 6).alarm is None


@pytest.mark.usefixtures("spark")
def test_statistics_of_days_do_not_depend_on_how_runs_split_them(own: Lake) -> None:
    stored = arrow.snapshot(own, schemas.examples(own.spec)).days()
    build_statistics(own, (stored[0], stored[-1]))
    at_once = rows(own, "feature_statistics")
    for day in reversed(stored):
        build_statistics(own, (day, day))
    assert rows(own, "feature_statistics") == at_once
    shown = Counter((row["day"], row["surface"]) for row in rows(own, "examples"))
    of_examples = [row for row in at_once if row["surface"] is not None]
    names = {row["feature"] for row in of_examples}
    assert {*counter_columns(own.spec)} < names
    assert len(of_examples) == len(names) * len(shown)
    for row in of_examples:
        assert row["num_rows"] == shown[row["day"], row["surface"]]


def test_a_check_fails_if_a_feature_became_null(
    lake_spec: DataSpec, spec_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lake, rng = Lake(str(tmp_path / "lake"), lake_spec), np.random.default_rng(0)
    days = [rng.integers(1, 5, 800) for _ in range(6)]
    write_statistics(lake, FIRST, [*days, np.zeros(800, int)])
    command = ["features", "check-drift", "--spec", str(spec_path), "--lake", lake.root, "--days"]
    assert main([*command, str(FIRST + timedelta(days=5))]) == 0
    capsys.readouterr()
    assert main([*command, str(FIRST + timedelta(days=6))]) == 2
    output = capsys.readouterr()
    assert "ALARM: 2026-01-07: ctx_x (feed): null in 100.0% of rows, 0.0% are usual" in output.out
    assert "Correct the logs of the day and run it again" in output.err
    assert main([*command, str(FIRST + timedelta(days=9))]) == 2
    assert "run `gemline features statistics`" in capsys.readouterr().err
