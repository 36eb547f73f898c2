"""Daily runs: CPU time to parse the DAGs, backfills, and effective training time of a day.

A backfill of seven days at once must give the same tables as seven runs of one day.
"""

import os
import re
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from statistics import median

import pyarrow as pa

from benchmarks.harness import ROOT, SIMULATOR_SPEC, BenchmarkResult
from benchmarks.pipelines import (
    SMALL_SIMULATION,
    pipeline_paths_in,
    run_steps_in_process,
    simulate_logs,
)
from dags.pipeline import all_days_flags, data_steps, gem_steps, model_flags
from dags.steps import PipelinePaths
from etl.spec import load_spec
from etl.spec.units import DaySplit, date_range
from etl.tables import arrow
from etl.tables.lake import Lake
from etl.tables.schemas import table_registry

PARSE_ROUNDS = 3
FIRST, LAST = date(2026, 1, 1), date(2026, 1, 7)  # days of the backfill
INCREMENT_OVERRIDES = {"days": 2, "users": 3000}
PREVIOUS_DAY, DAY = "2026-01-01", "2026-01-02"  # days of the incremental run
SCALE_FLAGS = ("--scale", "base")
MIN_STEP_SECONDS = 300  # minimum time of training steps to measure a share
TIMELINE_PATTERN = re.compile(r"effective training time .*")
PARSE_SCRIPT = """
import time
from airflow.sdk import DAG, Asset, CronPartitionTimetable, PartitionedAssetTimetable, task
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.providers.standard.hooks.subprocess import SubprocessHook
imported = time.process_time()
import dags.orchestration.daily
print("SECONDS", imported, time.process_time() - imported)
"""


def measure_dag_parsing(result: BenchmarkResult) -> None:
    """`dag_parse_cpu_s`: CPU seconds beyond Airflow's own imports, median of three processes."""
    env = os.environ | {
        "GEMLINE_SPEC": str(SIMULATOR_SPEC),
        "GEMLINE_RAW": "raw",
        "GEMLINE_LAKE": "lake",
        "GEMLINE_FIRST_DAY": "2026-01-01",
    }
    rounds = [_parse_seconds(env) for _ in range(PARSE_ROUNDS)]
    imports, parsing = (median(column) for column in zip(*rounds, strict=True))
    result.record("dag_parse_cpu_s", parsing, "")
    result.rows.append(
        ("parsing DAGs", f"{parsing:.2f} s CPU", f"{imports:.2f} s Airflow's imports", "", "< 2")
    )


def _parse_seconds(env: dict[str, str]) -> tuple[float, float]:
    process = subprocess.run(
        [sys.executable, "-c", PARSE_SCRIPT],
        env=env,
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    (line,) = (line for line in process.stdout.splitlines() if line.startswith("SECONDS"))
    imports, parsing = map(float, line.split()[1:])
    return imports, parsing


def measure_backfill(result: BenchmarkResult) -> None:
    """`backfill_equal`: whether all rows of all tables, teacher outputs included, are the same."""
    os.environ.setdefault("GEMLINE_SPARK_MASTER", "local[2]")
    spec = load_spec(SIMULATOR_SPEC)
    with tempfile.TemporaryDirectory() as work:
        once, daily = (pipeline_paths_in(work, name) for name in ("once", "daily"))
        simulate_logs(Path(once.raw), SMALL_SIMULATION)
        run_days(once, FIRST, LAST)
        for day in date_range(FIRST, LAST):
            run_days(daily, day, day)
        backfilled, by_day = (Lake(paths.lake, spec) for paths in (once, daily))
        names = [name for name in table_registry(spec) if backfilled.exists(name)]
        different = [name for name in names if not has_same_rows(backfilled, by_day, name)]
    result.figures["backfill_equal"] = not different
    outcome = f"differ: {', '.join(different)}" if different else f"{len(names)} tables equal"
    result.rows.append(("seven days at once", outcome, "seven daily runs", "", "the same"))


def run_days(paths: PipelinePaths, first: date, last: date) -> None:
    """Build the tables of some days and train GEM on them."""
    split = DaySplit(
        train_first=first,
        train_last=last,
        calibration=None,
        test_first=last,
        test_last=last,
        data_until=last,
    )
    model_steps = gem_steps(paths, model_flags(split), ("--scale", "tiny"))
    run_steps_in_process(
        [*data_steps(load_spec(paths.spec), paths, all_days_flags(split)), *model_steps]
    )


def has_same_rows(left: Lake, right: Lake, name: str) -> bool:
    """Whether a table has the same rows in both lakes, in any order.

    `history_version` is ignored, because it counts the writes of the history table.
    """
    schema = table_registry(left.spec)[name]
    left_rows, right_rows = (
        _comparable_rows(arrow.snapshot(lake, schema).read()) for lake in (left, right)
    )
    return left_rows == right_rows


def _comparable_rows(table: pa.Table) -> list[str]:
    compared = [name for name in table.column_names if name != "history_version"]
    return sorted(map(repr, table.select(compared).to_pylist()))


def measure_increment(result: BenchmarkResult) -> None:
    """`effective_training_time` of a day after the day before, from its printed timeline."""
    os.environ.setdefault("GEMLINE_SPARK_MASTER", "local[2]")
    with tempfile.TemporaryDirectory() as work:
        paths = pipeline_paths_in(work)
        simulate_logs(Path(paths.raw), INCREMENT_OVERRIDES)
        run_steps_in_process(
            data_steps(load_spec(paths.spec), paths, ("--days", f"{PREVIOUS_DAY}:{DAY}"))
        )
        _train_day(paths, PREVIOUS_DAY)
        timeline = _train_day(paths, DAY)
    spans = {name: float(s) for name, s in re.findall(r"([a-z][a-z ]*) ([\d.]+) s", timeline)}
    share = spans["steps"] / sum(spans.values())
    is_long_enough = spans["steps"] >= MIN_STEP_SECONDS
    reason = f"{spans['steps']:.0f} s of steps; {MIN_STEP_SECONDS} s are needed"
    result.record("effective_training_time", share if is_long_enough else None, reason)
    rest = ", ".join(f"{name} {s:.1f}" for name, s in spans.items() if name != "steps")
    result.rows.append(
        ("a day's increment", f"{spans['steps']:.0f} s of steps", rest, f"{share:.2f}", ">= 0.80")
    )


def _train_day(paths: PipelinePaths, day: str) -> str:
    """Train GEM on a day; returns its timeline."""
    command = ["train", "gem", *paths.cli_flags, "--days", day, *SCALE_FLAGS]
    process = subprocess.run(
        [sys.executable, "-m", "gemline", *command], cwd=ROOT, check=True, capture_output=True,
        text=True,
    )  # fmt: skip
    match = TIMELINE_PATTERN.search(process.stderr)
    assert match, process.stderr
    return match[0].partition(":")[2]
