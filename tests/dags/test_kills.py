"""A pipeline that is killed and restarted writes the same tables as an uninterrupted one."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from dags.pipeline import data_steps, latest_mature_split, pipeline_steps
from dags.runner import input_fingerprint, run_pipeline
from dags.steps import PipelinePaths, Step
from etl.spec.units import date_range
from etl.tables import step_state
from etl.tables.lake import Lake
from gemline import main
from tests.pipeline import TABLES, rows
from tests.small_pipeline import SmallPipeline
from tests.world import copy_of


def kill_when(
    command: list[str], reached: Callable[[], bool], delay: float = 0, timeout: float = 300
) -> None:
    """Start a pipeline; kill it and its children `delay` seconds after `reached` holds.

    It holds within `timeout` seconds.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "gemline", *command], start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + timeout
    while not reached() and time.monotonic() < deadline:
        assert process.poll() is None, "the pipeline ended before it was killed"
        time.sleep(0.005)
    time.sleep(delay)
    assert process.poll() is None, f"the pipeline ended within {delay:.1f} s"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    while group_exists(process.pid):  # a killed JVM holds its locks until its memory is freed
        assert time.monotonic() < deadline
        time.sleep(0.005)


def group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def steps_of(pipeline: SmallPipeline, lake: Lake) -> tuple[PipelinePaths, list[Step]]:
    paths = PipelinePaths(pipeline.spec, str(pipeline.raw), lake.root)
    split = latest_mature_split(lake.spec, *pipeline.days)
    return paths, pipeline_steps(lake.spec, paths, split, ("--scale", "tiny"))


def record_as_finished(pipeline: SmallPipeline, lake: Lake, names: list[str]) -> None:
    """Record steps as the runner does when they have finished."""
    paths, steps = steps_of(pipeline, lake)
    for step in steps:
        if step.name in names:
            fingerprint = input_fingerprint(lake.spec, paths, steps, step)
            step_state.write_step_state(paths.lake, step.name, fingerprint, 1.0)


def step_has_finished(lake: Lake, name: str) -> bool:
    return step_state.read_step_state(lake.root, name) is not None


def check_tables(actual: Lake, expected: Lake) -> None:
    for name in TABLES:
        assert rows(actual, name) == rows(expected, name), name
    assert not [p for p in Path(actual.root).rglob("*") if p.name.endswith(".partial")]


@pytest.mark.proof
def test_a_pipeline_killed_between_staging_and_commit_continues(
    small_pipeline: SmallPipeline, small_lake: Lake, tmp_path: Path
) -> None:
    """It is killed when examples are staged; steps that finished before do not run again.

    It continues up to the examples here, and to the end in the test below.
    """
    own = copy_of(small_lake, tmp_path / "lake")
    shutil.rmtree(own.table_uri("examples"))
    finished = ["ingest", "attributes", "labels", "items", "history"]
    record_as_finished(small_pipeline, own, finished)
    before = {step: step_state.read_step_state(own.root, step) for step in finished}
    command = small_pipeline.command(Path(own.root))
    kill_when(command, lambda: any(Path(own.table_uri("examples")).rglob("*.parquet")))
    assert step_state.read_step_state(own.root, "examples") is None
    paths, steps = steps_of(small_pipeline, own)
    names = [step.name for step in steps]
    run_pipeline(own.spec, paths, steps[: names.index("examples") + 1])
    check_tables(own, small_lake)
    assert {step: step_state.read_step_state(own.root, step) for step in finished} == before


@pytest.mark.proof
def test_a_pipeline_killed_in_every_step_trains_the_same_models(
    small_pipeline: SmallPipeline, small_lake: Lake, tmp_path: Path
) -> None:
    expected = Lake(str(tmp_path / "expected"), small_lake.spec)
    killed = Lake(str(tmp_path / "killed"), small_lake.spec)
    assert main(small_pipeline.command(Path(expected.root))) == 0
    paths, steps = steps_of(small_pipeline, killed)
    days = f"{small_pipeline.days[0]}:{small_pipeline.days[1]}"
    data_step_names = {step.name for step in data_steps(small_lake.spec, paths, ("--days", days))}
    delay = random.Random(0)
    for step in steps[:-1]:
        longest = 6 if step.name in data_step_names else 0.3  # Spark steps take seconds
        has_finished = partial(step_has_finished, killed, step.name)
        command = small_pipeline.command(Path(killed.root))
        kill_when(command, has_finished, delay.uniform(0, longest))
        print(f"killed after {step.name}", flush=True)
    assert main(small_pipeline.command(Path(killed.root))) == 0
    check_tables(killed, small_lake)
    second, last = small_pipeline.days[0] + timedelta(days=1), small_pipeline.days[1]
    assert {
        (row["day"], row["fm_trained_until"]) for row in rows(killed, "teacher_predictions")
    } == {(day, day - timedelta(days=1)) for day in date_range(second, last)}
    assert Path(killed.root, "report.html").is_file()
    for path in sorted(Path(expected.root, "evaluations").iterdir()):
        other = Path(killed.root, "evaluations", path.name)
        assert pq.read_table(path).equals(pq.read_table(other)), path.name
    for table in ("teacher_predictions", "scores"):
        expected_rows = rows(expected, table)
        assert expected_rows and expected_rows == rows(killed, table), table
