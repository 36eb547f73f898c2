"""Airflow itself: three days become rankers, though a task and the scheduler are killed."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from dags.standalone import Airflow, ask, start
from etl.tables import lease, pins
from etl.tables.lake import Lake
from ranking.package.versions import current
from tests.conftest import FIRST, LAST, ROOT
from tests.dags.conftest import environment
from tests.pipeline import TABLES, build_tables, rows

pytestmark = pytest.mark.spark

PORT = 18080
DAYS = [FIRST + timedelta(days=n) for n in range(3)]
SOON = {  # who has lost his task is found out at once
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "15",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "5",
    "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "10",
    "AIRFLOW__SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": "15",
}
Started = tuple[dict[str, str], list[Airflow]]


def processes(*words: str) -> list[int]:
    """Processes whose command line has all of some words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_text().replace("\0", " ")
        except OSError:
            continue
        if all(word in line for word in words):
            found.append(int(path.parent.name))
    return found


def wait(what: Callable[[], object], seconds: float) -> object:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = what()
        if found:
            return found
        time.sleep(1)
    raise AssertionError(f"{what.__doc__ or what} did not happen in {seconds} s")


@pytest.fixture
def airflow(tmp_path: Path, spec_path: Path, raw: Path) -> Iterator[Started]:
    """Its environment, and what to stop in the end."""
    env = environment(tmp_path, spec_path, raw, PORT) | SOON
    running = [start(env)]
    try:
        yield env, running
    finally:
        for one in running:
            one.stop()


@pytest.mark.proof
def test_three_days_become_rankers_though_things_are_killed(
    spark: object, lake: Lake, airflow: Started, raw: Path, tmp_path: Path
) -> None:
    env, running = airflow
    address = env["AIRFLOW__API__BASE_URL"]
    own = Lake(str(tmp_path / "lake"), lake.spec)
    for port in (8793, 8794):  # log servers, which would listen on all interfaces
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
    for day in DAYS:
        body = {"logical_date": None, "partition_key": str(day)}
        ask(address, "dags/simulator_raw/dagRuns", body)

    (task, *_) = wait(lambda: processes("-m gemline train gem", own.root), 900)
    os.kill(task, signal.SIGKILL)
    print("killed a task", flush=True)
    (scheduler,) = [process.pid for process in running[0].processes if "scheduler" in process.args]
    os.kill(scheduler, signal.SIGKILL)
    print("killed the scheduler", flush=True)
    another = subprocess.Popen(
        [sys.executable, "-m", "airflow", "scheduler", "--skip-serve-logs"], cwd=ROOT, env=env,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    running.append(Airflow((another,)))

    def rankers_done() -> bool:
        runs = ask(address, "dags/simulator_rankers/dagRuns?limit=10")["dag_runs"]
        failed = [run for run in runs if run["state"] == "failed"]
        assert not failed, failed
        return {r["partition_key"] for r in runs if r["state"] == "success"} == set(map(str, DAYS))

    wait(rankers_done, 1800)
    for surface in lake.spec.ad_surfaces:
        assert current(own.root, surface).target
    tried = ask(address, "dags/simulator_gem/dagRuns/~/taskInstances?limit=100")["task_instances"]
    assert max(task["try_number"] for task in tried if task["task_id"] == "gem") > 1
    assert pins.pinned(own.root) == []
    told = ask(address, "assets/events?limit=100&order_by=timestamp")["asset_events"]
    knowledge = [event for event in told if event["name"] == "simulator/knowledge"]
    assert [event["partition_key"] for event in knowledge] == list(map(str, DAYS))
    last = knowledge[-1]["extra"]["tables"]
    assert last["examples"]["version"] == own.version("examples")
    ranged = Lake(str(tmp_path / "ranged"), lake.spec)
    build_tables(ranged, raw, (DAYS[0], DAYS[-1]))
    for name in TABLES:
        assert rows(own, name) == rows(ranged, name), name
    assert LAST not in {row["day"] for row in rows(own, "examples")}


def states_of(address: str, dag: str, task: str) -> set[str]:
    """The states of a task in all runs of a DAG."""
    found = ask(address, f"dags/{dag}/dagRuns/~/taskInstances?limit=100")["task_instances"]
    return {one["state"] for one in found if one["task_id"] == task}


@pytest.mark.proof
def test_a_backfill_waits_for_logs_and_retries_after_a_temporary_fault(
    lake: Lake, spec_path: Path, raw: Path, tmp_path: Path, posted_alerts: list[dict[str, str]]
) -> None:
    """The logs come while the sensor waits; another command holds the lease of the first try."""
    logs = tmp_path / "raw"
    logs.mkdir()
    waiting = {"GEMLINE_SCHEDULE": "0 4 * * *", "GEMLINE_WAIT_HOURS": "1"}
    late = {"GEMLINE_DEADLINE_HOURS": "0.01"}
    env = environment(tmp_path, spec_path, logs, PORT + 2) | waiting | late
    address, own = env["AIRFLOW__API__BASE_URL"], Lake(str(tmp_path / "lake"), lake.spec)
    dates = ["--from-date", str(FIRST), "--to-date", str(FIRST + timedelta(days=1))]
    create = [sys.executable, "-m", "airflow", "backfill", "create", "--max-active-runs", "1"]
    running = start(env)
    try:
        wait(lambda: ask(address, "dags?tags=simulator")["total_entries"] >= 5, 60)
        subprocess.run(
            [*create, "--dag-id", "simulator_raw", *dates], env=env, cwd=ROOT, check=True
        )
        wait(lambda: "up_for_reschedule" in states_of(address, "simulator_raw", "wait"), 120)
        late_run = r"simulator_raw backfill__.*: not done in time"
        wait(lambda: any(re.match(late_run, alert["text"]) for alert in posted_alerts), 120)
        with lease.held(own.root, ["ingest"], "another command"):
            shutil.copytree(raw, logs, dirs_exist_ok=True)
            wait(lambda: "up_for_retry" in states_of(address, "simulator_tables", "ingest"), 300)
        wait(lambda: "success" in states_of(address, "simulator_tables", "ingest"), 300)
    finally:
        running.stop()
    ingested = [row for row in rows(lake, "events") if row["day"] == FIRST]
    assert rows(own, "events") == ingested


@pytest.mark.proof
def test_a_start_that_is_interrupted_leaves_nothing_running(
    spec_path: Path, raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(address: str) -> bool:
        raise KeyboardInterrupt

    env = environment(tmp_path, spec_path, raw, PORT + 1)
    monkeypatch.setattr("dags.standalone._healthy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start(env)
    assert not processes("-m airflow", "scheduler"), "an Airflow in which all are admins"
