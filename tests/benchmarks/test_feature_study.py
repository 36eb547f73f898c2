"""The study of features: changed counters, their tables and the verdicts."""

from pathlib import Path

import pytest

from benchmarks.harness import KUAIRAND_SPEC, SIMULATOR_SPEC
from benchmarks.pipelines import BENCH_DAYS
from benchmarks.studies import agreement, scaling
from benchmarks.studies.counter_changes import CHANGES, CounterChange
from benchmarks.studies.feature_study import SPLIT, tables_with_counters, write_spec
from benchmarks.studies.features import features_table
from benchmarks.studies.model_changes import DataSet
from benchmarks.studies.seeded_estimates import SeededEstimate
from dags.pipeline import latest_mature_split
from etl.spec import load_spec
from etl.spec.units import parse_date_range
from etl.tables.lake import Lake
from tests.pipeline import rows

SPECS: dict[DataSet, Path] = {"simulated": SIMULATOR_SPEC, "kuairand": KUAIRAND_SPEC}


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_makes_a_valid_spec_with_other_counters(name: str, tmp_path: Path) -> None:
    for data, change in CHANGES[name].items():
        base = load_spec(SPECS[data])
        changed = write_spec(base, change, tmp_path / "spec.yaml")
        assert changed.counters.columns != base.counters.columns
        same = {"counters": base.counters}
        assert changed.model_copy(update=same).hash == base.hash, "only counters are changed"


def test_counters_are_chosen_on_days_before_those_that_other_studies_report() -> None:
    reported = latest_mature_split(load_spec(SIMULATOR_SPEC), *parse_date_range(BENCH_DAYS))
    assert SPLIT.test_last < reported.test_first
    assert SPLIT.test_last < min(scaling.SPLIT.test_first, agreement.SPLIT.test_first)


@pytest.mark.spark
def test_examples_have_the_changed_counters_and_the_others_as_before(
    lake: Lake, tmp_path: Path
) -> None:
    change = CounterChange({"windows": ["1d", "2d"]}, {"keys": [["hour"]]})
    changed = tables_with_counters(lake, change, tmp_path)
    before, after = (
        {row["impression_id"]: row for row in rows(each, "examples")} for each in (lake, changed)
    )
    assert before.keys() == after.keys() and before
    columns, changed_columns = (
        {counter.column for counter in each.spec.counters.columns} for each in (lake, changed)
    )
    assert any(name.startswith("cnt_hour_") for name in changed_columns - columns)
    for impression, row in after.items():
        assert changed_columns <= set(row)
        for name in columns & changed_columns:
            assert row[name] == before[impression][name]


def test_tables_of_a_change_are_built_once(lake: Lake, tmp_path: Path) -> None:
    (tmp_path / "lake").mkdir()  # where an earlier call built them
    tables_with_counters(lake, CounterChange({"windows": ["1d"]}), tmp_path)
    assert not list((tmp_path / "lake").iterdir())


def test_changes_are_better_only_beyond_the_noise_of_all_comparisons() -> None:
    def estimate(value: float, error: float) -> SeededEstimate:
        return SeededEstimate(value, error, 1000.0)

    clear, marginal, worse = estimate(-1e-3, 1e-4), estimate(-2.1e-4, 1e-4), estimate(1e-3, 1e-4)
    rows: dict[tuple[DataSet, str], dict[str, SeededEstimate]] = {
        ("kuairand", "first"): {"click": clear, "like": marginal},
        ("simulated", "first"): {"click": worse, "like": marginal},
    }
    result = features_table(rows, 2)
    assert marginal.p_value < 0.05, "alone they would be outside noise"
    assert result.figures == {"better_kuairand": ["first, click"], "better_simulated": []}
