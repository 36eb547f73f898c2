"""The data steps write the same tables on a standalone cluster that loses a worker as locally."""

from contextlib import suppress
from pathlib import Path
from subprocess import TimeoutExpired

import pytest

from dags.pipeline import data_steps
from dags.steps import PipelinePaths
from etl.runtime.spark import COMPILE_LARGE_METHODS
from etl.tables.lake import Lake
from etl.tables.lease import hold_leases
from tests.cluster.standalone import cluster, kill
from tests.conftest import FIRST, LAST
from tests.pipeline import TABLES, rows

STEP_THAT_LOSES_A_WORKER = "examples"
DYNAMIC_ALLOCATION = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
}


def executor_logs(folder: Path) -> set[Path]:
    """The logs of all executors that the first worker has started."""
    return set((folder / "worker-0").glob("app-*/*/stderr"))


def has_started_task(logs: set[Path]) -> bool:
    """Whether one of the executors has started a task."""
    return any("Running task" in log.read_text() for log in logs)


@pytest.mark.proof
def test_a_cluster_that_loses_a_worker_writes_the_same_tables(
    lake: Lake, spec_path: Path, raw: Path, tmp_path: Path
) -> None:
    own = tmp_path / "lake"
    paths = PipelinePaths(spec_path, str(raw), str(own))
    steps = data_steps(lake.spec, paths, ("--days", f"{FIRST}:{LAST}"))
    with cluster(tmp_path, workers=2) as running:
        for step in steps:
            before = executor_logs(tmp_path)
            job = running.submit(["gemline.py", *step.command])
            if step.name == STEP_THAT_LOSES_A_WORKER:
                while not has_started_task(executor_logs(tmp_path) - before):
                    assert job.poll() is None, "the step ended before its worker was lost"
                    with suppress(TimeoutExpired):  # drain the pipe, which blocks when full
                        job.communicate(timeout=0.1)
                kill(running.workers[0])
            _, errors = job.communicate(timeout=400)
            assert job.returncode == 0, (step.name, errors[-4000:])
        assert "lost" in errors.lower(), errors[-4000:]
        commands = [log.read_text().splitlines()[0] for log in executor_logs(tmp_path)]
        assert all(COMPILE_LARGE_METHODS in command for command in commands), commands
        event_logs = [path for path in running.event_logs.iterdir() if path.stat().st_size]
    assert len(event_logs) == len(steps), "each job writes an event log"
    actual = Lake(str(own), lake.spec)
    for name in TABLES:
        assert rows(actual, name) == rows(lake, name), name


@pytest.mark.proof
def test_a_step_in_client_mode_ends_with_the_exit_code_of_its_command(
    lake: Lake, spec_path: Path, raw: Path, tmp_path: Path
) -> None:
    """2 for input that is refused, and 75 for a temporary failure; executors are allocated."""
    own = str(tmp_path / "lake")
    paths = PipelinePaths(spec_path, str(raw), own)
    ingest = ["gemline.py", "etl", "ingest", *paths.cli_flags, "--raw", paths.raw, "--days"]
    days = f"{FIRST}:{LAST}"
    with cluster(tmp_path, workers=1) as running:

        def exit_code(day_range: str) -> int:
            job = running.submit([*ingest, day_range], DYNAMIC_ALLOCATION)
            job.communicate(timeout=400)
            return job.returncode

        assert exit_code("2020-01-01") == 2
        with hold_leases(own, ["ingest"], "another command"):
            assert exit_code(days) == 75
        assert exit_code(days) == 0
    assert rows(Lake(own, lake.spec), "events") == rows(lake, "events")
