"""A local Airflow with the DAGs of one spec: its processes, its DAG runs."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from dags.orchestration.operators import SPARK_CONN_ID, TORCH_CONN_ID
from dags.orchestration.runs import http_request
from dags.orchestration.settings import MANUAL_SCHEDULE, ROOT
from dags.steps import PipelinePaths
from etl.errors import TemporaryError, UserError
from etl.runtime.java import delta_jars
from etl.tables.uri import is_url

START_TIMEOUT_SECONDS = 180
STOP_TIMEOUT_SECONDS = 30
# As `airflow standalone` starts them, but without log servers: these listen on all interfaces.
AIRFLOW_COMPONENTS = (
    ("api-server",),
    ("scheduler", "--skip-serve-logs"),
    ("triggerer", "--skip-serve-logs"),
    ("dag-processor",),
)
AIRFLOW_COMMAND = (sys.executable, "-m", "airflow")


def airflow_environment(
    paths: PipelinePaths, home: Path, port: int, first_day: date
) -> dict[str, str]:
    """Environment variables of a local Airflow: on loopback only, every user is an admin."""
    address = f"http://127.0.0.1:{port}"
    python = Path(sys.executable)
    spark = {"conn_type": "spark", "host": "local[*]", "extra": {"deploy-mode": "client"}}
    torch = {"conn_type": "generic", "extra": {"python": str(python)}}
    return os.environ | {
        "AIRFLOW_HOME": str(home.absolute()),
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags" / "orchestration"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{address}/execution/",
        "AIRFLOW__API__HOST": "127.0.0.1",
        "AIRFLOW__API__PORT": str(port),
        "AIRFLOW__API__BASE_URL": address,
        f"AIRFLOW_CONN_{SPARK_CONN_ID.upper()}": json.dumps(spark),
        f"AIRFLOW_CONN_{TORCH_CONN_ID.upper()}": json.dumps(torch),
        "GEMLINE_SPEC": str(paths.spec.absolute()),
        "GEMLINE_RAW": paths.raw if is_url(paths.raw) else str(Path(paths.raw).absolute()),
        "GEMLINE_LAKE": paths.lake if is_url(paths.lake) else str(Path(paths.lake).absolute()),
        "GEMLINE_FIRST_DAY": str(first_day),
        "GEMLINE_SCHEDULE": MANUAL_SCHEDULE,
        "GEMLINE_WAIT_HOURS": "0",
        "GEMLINE_SPARK_JARS": ",".join(map(str, delta_jars())),
        "GEMLINE_SPARK_PROPERTIES": str(ROOT / "conf/spark/laptop.conf"),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": str(python),
        "PATH": f"{python.parent}:{os.environ['PATH']}",
    }


@dataclass(frozen=True)
class AirflowProcesses:
    """The processes of a local Airflow, in one process group, and the file of what they print."""

    processes: tuple[subprocess.Popen[bytes], ...]
    log_path: Path

    @property
    def is_running(self) -> bool:
        """Whether all processes are running."""
        return all(process.poll() is None for process in self.processes)

    def stop(self) -> None:
        """Terminate the processes and their children; kill those that do not exit in time."""
        group = self.processes[0].pid
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            for process in self.processes:
                process.wait(STOP_TIMEOUT_SECONDS)
        with suppress(ProcessLookupError):  # workers of a killed scheduler ignore SIGTERM
            os.killpg(group, signal.SIGKILL)
        for process in self.processes:
            process.wait()


def start_airflow(env: Mapping[str, str]) -> AirflowProcesses:
    """Migrate the database, create the pools and start Airflow; returns once it is healthy.

    Raises UserError where it does not start. On any error or interruption, all processes that were
    started are stopped.
    """
    _run_airflow_command(["db", "migrate"], env)
    for pool in (SPARK_CONN_ID, TORCH_CONN_ID):
        _run_airflow_command(["pools", "set", pool, "1", ""], env)
    log_path = Path(env["AIRFLOW_HOME"], "logs", "standalone.log")
    log_path.parent.mkdir(parents=True, exist_ok=True)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with log_path.open("ab") as log:
            for component in AIRFLOW_COMPONENTS:
                command = [*AIRFLOW_COMMAND, *component]
                group = processes[0].pid if processes else 0  # 0: a new group
                processes.append(
                    subprocess.Popen(
                        command, env=env, cwd=ROOT, stdout=log, stderr=log, process_group=group
                    )
                )
        airflow = AirflowProcesses(tuple(processes), log_path)
        _wait_until_healthy(airflow, env["AIRFLOW__API__BASE_URL"])
    except BaseException:
        if processes:
            AirflowProcesses(tuple(processes), log_path).stop()
        raise
    return airflow


def _wait_until_healthy(airflow: AirflowProcesses, base_url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while not _is_healthy(base_url):
        if not airflow.is_running or time.monotonic() > deadline:
            raise UserError(f"Airflow did not start; the reason is in {airflow.log_path}")
        time.sleep(1)


def _run_airflow_command(words: Sequence[str], env: Mapping[str, str]) -> None:
    result = subprocess.run(
        [*AIRFLOW_COMMAND, *words], env=env, cwd=ROOT, capture_output=True, text=True, check=False
    )
    if result.returncode:
        printed = (result.stderr.strip() or result.stdout.strip()).splitlines()
        reason = printed[-1] if printed else f"exit code {result.returncode}"
        raise UserError(f"airflow {words[0]} failed: {reason}")


def _is_healthy(base_url: str) -> bool:
    """Whether the API, the scheduler and the DAG processor are healthy."""
    try:
        health = api_request(base_url, "monitor/health")
    except OSError:
        return False
    return all(health[name]["status"] == "healthy" for name in ("scheduler", "dag_processor"))


def api_request(base_url: str, path: str, body: object = None) -> Any:
    """The response of the REST API to a GET, or to a POST of `body`."""
    return json.loads(http_request(f"{base_url}/api/v2/{path}", body))


def trigger_dag_run(base_url: str, dag_id: str, days: str) -> None:
    """Trigger a run of `days`, written first:last."""
    api_request(base_url, f"dags/{dag_id}/dagRuns", {"logical_date": None, "conf": {"days": days}})


@dataclass(frozen=True)
class FinishedDagRun:
    """A DAG run that has ended, and the day that it processed."""

    dag_id: str
    day: str | None
    state: str
    seconds: float

    def __str__(self) -> str:
        """The run in one line."""
        day = f" {self.day}" if self.day else ""
        return f"{self.dag_id}{day}: {self.state} in {self.seconds:.0f} s"


def finished_dag_runs(base_url: str, spec_name: str) -> dict[tuple[str, str], FinishedDagRun]:
    """The latest finished runs of the DAGs of a spec, oldest first, by DAG id and run id."""
    runs = api_request(base_url, "dags/~/dagRuns?limit=100&order_by=-end_date")["dag_runs"]
    return {
        (run["dag_id"], run["dag_run_id"]): FinishedDagRun(
            run["dag_id"], run["partition_key"], run["state"], run["duration"]
        )
        for run in reversed(runs)
        if run["end_date"] and run["dag_id"].startswith(f"{spec_name}_")
    }


def watch_dag_runs(
    base_url: str,
    spec_name: str,
    airflow: AirflowProcesses,
    already_finished: Collection[tuple[str, str]],
) -> Iterator[FinishedDagRun]:
    """Yield each run of the DAGs of a spec when it ends; those in `already_finished` are left out.

    Raises TemporaryError when a process of Airflow has ended.
    """
    seen = set(already_finished)
    while airflow.is_running:
        time.sleep(5)
        with suppress(OSError):
            for key, run in finished_dag_runs(base_url, spec_name).items():
                if key not in seen:
                    seen.add(key)
                    yield run
    raise TemporaryError(f"a process of Airflow has ended; the reason is in {airflow.log_path}")
