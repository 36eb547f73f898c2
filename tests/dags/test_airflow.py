"""A real Airflow: three days to rankers, with killed processes, late logs and held leases."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from dags.commands import AirflowArgs, _stored_days
from dags.orchestration.standalone import (
    AirflowProcesses,
    api_request,
    start_airflow,
    watch_dag_runs,
)
from etl.errors import TemporaryError
from etl.spec.effects import ADVERTISER_TABLES
from etl.spec.units import MICROS, DayRange
from etl.tables import lease, step_state
from etl.tables.lake import Lake
from ranking.registry.manifest import read_manifest
from ranking.registry.ranker import live_pointer, live_version
from tests.conftest import FIRST, LAST, ROOT
from tests.dags.conftest import environment
from tests.pipeline import TABLES, build_tables, rows
from tests.waiting import wait_for

pytestmark = pytest.mark.spark

PORT = 18080
DAYS = [FIRST + timedelta(days=n) for n in range(3)]
FAST_FAILURE_DETECTION = {
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "15",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "5",
    "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "10",
    "AIRFLOW__SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": "15",
}
RunningAirflow = tuple[dict[str, str], list[AirflowProcesses]]


def processes_with(*words: str) -> list[int]:
    """Ids of the processes whose command line contains all words."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command_line = path.read_text().replace("\0", " ")
        except OSError:
            continue
        if all(word in command_line for word in words):
            pids.append(int(path.parent.name))
    return pids


@pytest.fixture
def airflow(tmp_path: Path, spec_path: Path, raw: Path) -> Iterator[RunningAirflow]:
    """The environment of a running Airflow, and its processes, which are stopped at the end."""
    env = environment(tmp_path, spec_path, raw, PORT) | FAST_FAILURE_DETECTION
    running = [start_airflow(env)]
    try:
        yield env, running
    finally:
        for processes in running:
            processes.stop()


def test_rankers_train_on_the_days_that_earlier_calls_have_run(
    spark: object, lake: Lake, spec_path: Path, raw: Path, tmp_path: Path
) -> None:
    def days_stored(root: str) -> list[DayRange]:
        days = (str(LAST + timedelta(days=1)),)
        return _stored_days(AirflowArgs(spec=spec_path, lake=root, raw=str(raw), days=days))

    assert days_stored(lake.root) == [(FIRST, LAST)]
    assert days_stored(str(tmp_path / "new")) == []


def test_watching_ends_with_an_error_when_a_process_has_ended(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    processes = AirflowProcesses((ended,), tmp_path / "standalone.log")
    with pytest.raises(TemporaryError, match=r"has ended; the reason is in .*standalone\.log"):
        list(watch_dag_runs("http://127.0.0.1:1", "shop", processes, ()))


@pytest.mark.proof
def test_three_days_become_rankers_though_a_task_and_the_scheduler_are_killed(
    spark: object, lake: Lake, airflow: RunningAirflow, raw: Path, tmp_path: Path
) -> None:
    env, running = airflow
    address = env["AIRFLOW__API__BASE_URL"]
    own = Lake(str(tmp_path / "lake"), lake.spec)
    for port in (8793, 8794):  # log servers, which would listen on all interfaces
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
    for day in DAYS:
        body = {"logical_date": None, "partition_key": str(day)}
        api_request(address, "dags/simulator_raw/dagRuns", body)

    (task_pid, *_) = wait_for(lambda: processes_with("-m gemline train gem", own.root), 900)
    os.kill(task_pid, signal.SIGKILL)
    print("killed a task", flush=True)
    (scheduler_pid,) = [
        process.pid for process in running[0].processes if "scheduler" in str(process.args)
    ]
    os.kill(scheduler_pid, signal.SIGKILL)
    print("killed the scheduler", flush=True)
    second_scheduler = subprocess.Popen(
        [sys.executable, "-m", "airflow", "scheduler", "--skip-serve-logs"], cwd=ROOT, env=env,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    running.append(AirflowProcesses((second_scheduler,), running[0].log_path))

    def rankers_done() -> bool:
        runs = api_request(address, "dags/simulator_rankers/dagRuns?limit=10")["dag_runs"]
        failed = [run for run in runs if run["state"] == "failed"]
        assert not failed, failed
        return {r["partition_key"] for r in runs if r["state"] == "success"} == set(map(str, DAYS))

    wait_for(rankers_done, 3600)
    for surface in lake.spec.ad_surfaces:
        assert live_pointer(own.root, surface).live_folder
    instances = api_request(address, "dags/simulator_gem/dagRuns/~/taskInstances?limit=100")
    gem_tasks = [task for task in instances["task_instances"] if task["task_id"] == "gem"]
    assert max(task["try_number"] for task in gem_tasks) > 1
    assert step_state.read_pins(own.root) == []
    events = api_request(address, "assets/events?limit=100&order_by=timestamp")["asset_events"]
    published = [event for event in events if event["name"] == "simulator/teacher_predictions"]
    assert [event["partition_key"] for event in published] == list(map(str, DAYS))
    tables = published[-1]["extra"]["tables"]
    assert tables["examples"]["version"] == own.version("examples")
    built_at_once = Lake(str(tmp_path / "built_at_once"), lake.spec)
    build_tables(built_at_once, raw, (DAYS[0], DAYS[-1]))
    for name in TABLES:
        assert rows(own, name) == rows(built_at_once, name), name
    assert LAST not in {row["day"] for row in rows(own, "examples")}
    # No campaign has a conversion yet, which curves need; the first snapshot is of the fourth day.
    for name in ADVERTISER_TABLES - {"response_curves", "audience_label_snapshots"}:
        assert rows(own, name), name
    refresh_the_fourth_day(address, own)


def refresh_the_fourth_day(address: str, lake: Lake) -> None:
    """A refresh until six in the evening: its tables, and rankers that have learned its labels."""
    conf = {"data_until": f"{LAST}T18:00"}
    api_request(address, "dags/simulator_refresh/dagRuns", {"logical_date": None, "conf": conf})

    def refreshed() -> bool:
        (run,) = api_request(address, "dags/simulator_refresh/dagRuns?limit=10")["dag_runs"]
        assert run["state"] != "failed", run
        return bool(run["state"] == "success")

    wait_for(refreshed, 1200)
    evening = lake.spec.day_start(LAST) + 18 * 3600
    for name in ("examples", "audience_counts", "audience_label_snapshots"):
        assert LAST in {row["day"] for row in rows(lake, name)}, name
    for row in rows(lake, "impressions"):
        for name in lake.spec.objectives:
            is_final = row[f"label_mature_ts_{name}"] < evening * MICROS["s"]
            assert is_final or row[f"label_{name}"] is None, row
    for surface in lake.spec.ad_surfaces:
        training = read_manifest(live_version(lake.root, surface)).training
        assert training and training.labels_until == evening


def task_states(address: str, dag_id: str, task_id: str) -> set[str]:
    """The states of a task in all runs of a DAG."""
    instances = api_request(address, f"dags/{dag_id}/dagRuns/~/taskInstances?limit=100")
    return {task["state"] for task in instances["task_instances"] if task["task_id"] == task_id}


@pytest.mark.proof
def test_a_backfill_waits_for_logs_and_retries_after_a_temporary_fault(
    lake: Lake, spec_path: Path, raw: Path, tmp_path: Path, posted_alerts: list[dict[str, str]]
) -> None:
    """Logs arrive while the sensor waits; another command holds the lease at the first try."""
    logs = tmp_path / "raw"
    logs.mkdir()
    env = environment(tmp_path, spec_path, logs, PORT + 2) | {
        "GEMLINE_SCHEDULE": "0 4 * * *",
        "GEMLINE_WAIT_HOURS": "1",
        "GEMLINE_DEADLINE_HOURS": "0.01",
    }
    address, own = env["AIRFLOW__API__BASE_URL"], Lake(str(tmp_path / "lake"), lake.spec)
    dates = ["--from-date", str(FIRST), "--to-date", str(FIRST + timedelta(days=1))]
    create = [sys.executable, "-m", "airflow", "backfill", "create", "--max-active-runs", "1"]
    running = start_airflow(env)
    try:
        wait_for(lambda: api_request(address, "dags?tags=simulator")["total_entries"] >= 5, 60)
        subprocess.run(
            [*create, "--dag-id", "simulator_raw", *dates], env=env, cwd=ROOT, check=True
        )
        wait_for(lambda: "up_for_reschedule" in task_states(address, "simulator_raw", "wait"), 120)
        missed = r"simulator_raw backfill__.*: deadline missed"
        wait_for(lambda: any(re.match(missed, alert["text"]) for alert in posted_alerts), 120)
        with lease.hold_leases(own.root, ["ingest"], "another command"):
            shutil.copytree(raw, logs, dirs_exist_ok=True)
            wait_for(
                lambda: "up_for_retry" in task_states(address, "simulator_tables", "ingest"), 300
            )
        wait_for(lambda: "success" in task_states(address, "simulator_tables", "ingest"), 300)
    finally:
        running.stop()
    ingested = [row for row in rows(lake, "events") if row["day"] == FIRST]
    assert rows(own, "events") == ingested


@pytest.mark.proof
def test_an_interrupted_start_leaves_no_process_running(
    spec_path: Path, raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(base_url: str) -> bool:
        raise KeyboardInterrupt

    env = environment(tmp_path, spec_path, raw, PORT + 1)
    monkeypatch.setattr("dags.orchestration.standalone._is_healthy", interrupt)
    with pytest.raises(KeyboardInterrupt):
        start_airflow(env)
    assert not processes_with("-m airflow", "scheduler"), "processes of Airflow are still running"
