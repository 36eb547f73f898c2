"""The data steps on a real cluster that loses a worker give the tables of local mode."""

import time
from pathlib import Path

import pytest

from dags.line import Place, data_steps
from etl.tables.lake import Lake
from tests.cluster.standalone import cluster, kill
from tests.conftest import FIRST, LAST
from tests.pipeline import TABLES, rows

FILES = {  # the file of each step, for spark-submit
    "ingest": "etl/ingest.py",
    "attributes": "etl/attributes.py",
    "labels": "etl/labels.py",
    "items": "features/items.py",
    "history": "features/history/build.py",
    "examples": "features/examples.py",
}
LOST = "examples"


@pytest.mark.proof
def test_a_cluster_that_loses_a_worker_writes_the_same_tables(
    lake: Lake, spec_path: Path, raw: Path, tmp_path: Path
) -> None:
    own = tmp_path / "lake"
    steps = data_steps(Place(spec_path, str(raw), str(own)), ("--days", f"{FIRST}:{LAST}"))
    with cluster(tmp_path, workers=2) as running:
        for step in steps:
            job = running.submit([FILES[step.name], *step.command[2:]])
            if step.name == LOST:
                executors = tmp_path / "worker-0"
                while not list(executors.glob("app-*/*/stderr")):
                    time.sleep(0.1)
                time.sleep(8)  # in the middle of its stages
                assert job.poll() is None, "the step ended before its worker was lost"
                kill(running.workers[0])
            _, said = job.communicate(timeout=400)
            assert job.returncode == 0, (step.name, said[-4000:])
        assert "lost" in said.lower(), said[-4000:]
    made = Lake(str(own), lake.spec)
    for name in TABLES:
        assert rows(made, name) == rows(lake, name), name
