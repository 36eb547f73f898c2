"""Batch scripts on a Slurm of two nodes write the tables of a local run, and train on both."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dags.clusters.config import Resources, SlurmCluster, Training
from dags.clusters.slurm import SUBMIT_SCRIPT, slurm_scripts
from dags.pipeline import GEM_MODEL_DIR, data_steps, gem_steps, model_flags
from dags.steps import PipelinePaths, Step
from etl.spec import load_spec
from etl.spec.units import DaySplit
from etl.tables.lake import Lake
from tests.cluster.slurm import job_states, slurm_cluster
from tests.conftest import FIRST, LAST, ROOT
from tests.pipeline import TABLES, rows

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(shutil.which("slurmctld") is None, reason="Slurm is not installed"),
]
TIMEOUT_SECONDS = 900
WAITING = {"PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "REQUEUED", "SUSPENDED"}


def run_jobs(folder: Path, scripts: dict[str, str], env: dict[str, str]) -> dict[str, str]:
    """Submit scripts, and wait until all jobs have ended; returns their states by name."""
    folder.mkdir()
    for name, text in scripts.items():
        (folder / name).write_text(text)
    subprocess.run(["bash", str(folder / SUBMIT_SCRIPT)], env=env, check=True)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        states = job_states(env)
        if not set(states.values()) & WAITING:
            return states
        time.sleep(1)
    raise AssertionError(states)


def cluster_on(folder: Path) -> SlurmCluster:
    return SlurmCluster(
        scheduler="slurm",
        python=sys.executable,
        home=str(ROOT),
        logs=str(folder),
        spark=Resources(cpus=1, memory_gb=2),
        training=Training(nodes=2, cpus=1, memory_gb=2),
        other=Resources(cpus=1, memory_gb=2),
    )


def test_jobs_write_the_tables_of_a_local_run_and_train_on_two_nodes(
    lake: Lake, spec_path: Path, raw: Path, tmp_path: Path
) -> None:
    paths = PipelinePaths(spec_path, str(raw), str(tmp_path / "lake"))
    split = DaySplit(
        train_first=FIRST, train_last=FIRST, calibration=None, test_first=LAST, test_last=LAST,
        data_until=LAST,
    )  # fmt: skip
    gem = gem_steps(paths, model_flags(split), ("--scale", "tiny", "--workers", "0"))[0]
    steps = [*data_steps(lake.spec, paths, ("--days", f"{FIRST}:{LAST}")), gem]
    with slurm_cluster(tmp_path) as env:
        scripts = dict(slurm_scripts(cluster_on(tmp_path), steps))
        states = run_jobs(tmp_path / "jobs", scripts, env)
    logs = "\n".join(log.read_text()[-1500:] for log in tmp_path.glob("[0-9]*-*.log"))
    assert states == {f"gemline-{step.name}": "COMPLETED" for step in steps}, logs
    own = Lake(str(tmp_path / "lake"), lake.spec)
    for name in TABLES:
        assert rows(own, name) == rows(lake, name), name
    assert (tmp_path / "lake" / GEM_MODEL_DIR / str(FIRST)).exists(), logs


def test_a_refusal_cancels_the_jobs_that_depend_on_it(spec_path: Path, tmp_path: Path) -> None:
    paths = PipelinePaths(spec_path, str(tmp_path / "no logs"), str(tmp_path / "lake"))
    steps = data_steps(load_spec(spec_path), paths, ("--days", f"{FIRST}:{LAST}"))
    with slurm_cluster(tmp_path) as env:
        states = run_jobs(tmp_path / "jobs", dict(slurm_scripts(cluster_on(tmp_path), steps)), env)
    refused = {name for name, state in states.items() if state == "FAILED"}
    assert "gemline-ingest" in refused and states["gemline-examples"] == "CANCELLED", states


def test_a_temporary_failure_is_requeued_and_the_log_keeps_both_attempts(tmp_path: Path) -> None:
    """What depends on the job waits for the second attempt."""
    program = tmp_path / "python"
    program.write_text(
        f"#!/bin/sh\necho attempt at $6\n[ -f {tmp_path}/tried ] && exit 0\n"
        f"touch {tmp_path}/tried\nexit 75\n"
    )
    program.chmod(0o755)
    steps = [
        Step("first", "torch", ("report", "--day", "first"), (), ("table",)),
        Step("second", "torch", ("report", "--day", "second"), ("table",), ()),
    ]
    cluster = cluster_on(tmp_path).model_copy(update={"python": str(program)})
    with slurm_cluster(tmp_path) as env:
        states = run_jobs(tmp_path / "jobs", dict(slurm_scripts(cluster, steps)), env)
    logs = {log.name: log.read_text().split() for log in tmp_path.glob("[0-9]*-*.log")}
    assert states == {"gemline-first": "COMPLETED", "gemline-second": "COMPLETED"}, logs
    assert [text.count("attempt") for _, text in sorted(logs.items())] == [2, 1], logs
