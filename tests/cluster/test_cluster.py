"""The data steps write the same tables on a standalone cluster that loses a worker as locally."""

from contextlib import suppress
from pathlib import Path
from subprocess import TimeoutExpired

import pytest

from dags.pipeline import data_steps
from dags.steps import PipelinePaths
from etl.runtime.spark import COMPILE_LARGE_METHODS
from etl.tables.lake import Lake
from tests.cluster.standalone import cluster, kill
from tests.conftest import FIRST, LAST
from tests.pipeline import TABLES, rows

STEP_THAT_LOSES_A_WORKER = "examples"


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
