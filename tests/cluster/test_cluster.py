"""The data steps on a real cluster that loses a worker give the tables of local mode."""

from contextlib import suppress
from pathlib import Path
from subprocess import TimeoutExpired

import pytest

from dags.line import Place, data_steps
from etl.tables.lake import Lake
from tests.cluster.standalone import cluster, kill
from tests.conftest import FIRST, LAST
from tests.pipeline import TABLES, rows

LOST = "examples"


def executors(folder: Path) -> set[Path]:
    """The logs of all executors that the first worker ever had."""
    return set((folder / "worker-0").glob("app-*/*/stderr"))


def busy(logs: set[Path]) -> bool:
    """Whether one of some executors has begun a task."""
    return any("Running task" in log.read_text() for log in logs)


@pytest.mark.proof
def test_a_cluster_that_loses_a_worker_writes_the_same_tables(
    lake: Lake, spec_path: Path, raw: Path, tmp_path: Path
) -> None:
    own = tmp_path / "lake"
    steps = data_steps(Place(spec_path, str(raw), str(own)), ("--days", f"{FIRST}:{LAST}"))
    with cluster(tmp_path, workers=2) as running:
        for step in steps:
            before = executors(tmp_path)
            job = running.submit(["gemline.py", *step.command])
            if step.name == LOST:
                while not busy(executors(tmp_path) - before):
                    assert job.poll() is None, "the step ended before its worker was lost"
                    with suppress(TimeoutExpired):  # read what it says, or it waits for a reader
                        job.communicate(timeout=0.1)
                kill(running.workers[0])
            _, said = job.communicate(timeout=400)
            assert job.returncode == 0, (step.name, said[-4000:])
        assert "lost" in said.lower(), said[-4000:]
        told = [path for path in running.events.iterdir() if path.stat().st_size]
    assert len(told) == len(steps), "each job leaves a log of its events"
    made = Lake(str(own), lake.spec)
    for name in TABLES:
        assert rows(made, name) == rows(lake, name), name
