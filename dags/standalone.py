"""Airflow on this machine, with the DAGs of one line: its connections, its pools, its days."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from dags.line import Place
from dags.operators import SPARK, TORCH
from dags.rest import answer
from dags.settings import NEVER, ROOT
from etl.errors import UserError
from etl.jars import delta_jars

STARTS_WITHIN, STOPS_WITHIN = 180, 30  # seconds
# What `airflow standalone` starts, without its log servers: these listen on all interfaces.
PARTS = (
    ("api-server",),
    ("scheduler", "--skip-serve-logs"),
    ("triggerer", "--skip-serve-logs"),
    ("dag-processor",),
)


def environment(place: Place, home: Path, port: int, first_day: date) -> dict[str, str]:
    """The variables of an Airflow that is this machine's own: loopback, everybody is admin."""
    address = f"http://127.0.0.1:{port}"
    python = Path(sys.executable)
    spark = {"conn_type": "spark", "host": "local[*]", "extra": {"deploy-mode": "client"}}
    torch = {"conn_type": "generic", "extra": {"python": str(python)}}
    return os.environ | {
        "AIRFLOW_HOME": str(home.absolute()),
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{address}/execution/",
        "AIRFLOW__API__HOST": "127.0.0.1",
        "AIRFLOW__API__PORT": str(port),
        "AIRFLOW__API__BASE_URL": address,
        f"AIRFLOW_CONN_{SPARK.upper()}": json.dumps(spark),
        f"AIRFLOW_CONN_{TORCH.upper()}": json.dumps(torch),
        "GEMLINE_SPEC": str(place.spec.absolute()),
        "GEMLINE_RAW": str(Path(place.raw).absolute()) if "://" not in place.raw else place.raw,
        "GEMLINE_LAKE": str(Path(place.lake).absolute()) if "://" not in place.lake else place.lake,
        "GEMLINE_FIRST_DAY": str(first_day),
        "GEMLINE_SCHEDULE": NEVER,
        "GEMLINE_WAIT_HOURS": "0",
        "GEMLINE_SPARK_JARS": ",".join(map(str, delta_jars())),
        "GEMLINE_SPARK_PROPERTIES": str(ROOT / "conf/spark/laptop.conf"),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": str(python),
        "PATH": f"{python.parent}:{os.environ['PATH']}",
    }


@dataclass(frozen=True)
class Airflow:
    """The processes of an Airflow, all of one process group."""

    processes: tuple[subprocess.Popen[bytes], ...]

    @property
    def is_running(self) -> bool:
        """Whether none of them has ended."""
        return all(process.poll() is None for process in self.processes)

    def stop(self) -> None:
        """End them and all that they started."""
        (group, *_) = (process.pid for process in self.processes)
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            for process in self.processes:
                process.wait(STOPS_WITHIN)
        with suppress(ProcessLookupError):  # workers whose scheduler was killed ignore the first
            os.killpg(group, signal.SIGKILL)
        for process in self.processes:
            process.wait()


def start(env: Mapping[str, str]) -> Airflow:
    """Prepare the database and start all parts of Airflow; it answers when this returns.

    Raises UserError where it does not. Whatever ends the start ends all that was started.
    """
    tool = [sys.executable, "-m", "airflow"]
    for words in (["db", "migrate"], *(["pools", "set", pool, "1", ""] for pool in (SPARK, TORCH))):
        done = subprocess.run([*tool, *words], env=env, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"airflow {words[0]} failed: {done.stderr.strip().splitlines()[-1]}")
    path = Path(env["AIRFLOW_HOME"], "logs", "standalone.log")
    path.parent.mkdir(parents=True, exist_ok=True)
    running = Airflow(())
    try:
        with path.open("ab") as log:
            for part in PARTS:
                group = running.processes[0].pid if running.processes else 0
                process = subprocess.Popen(
                    [*tool, *part], env=env, cwd=ROOT, stdout=log, stderr=log, process_group=group
                )
                running = Airflow((*running.processes, process))
        deadline = time.monotonic() + STARTS_WITHIN
        while not _healthy(env["AIRFLOW__API__BASE_URL"]):
            if not running.is_running or time.monotonic() > deadline:
                raise UserError(f"Airflow did not start; {path} tells why")
            time.sleep(1)
    except BaseException:
        if running.processes:
            running.stop()
        raise
    return running


def _healthy(address: str) -> bool:
    """Whether Airflow answers, and its scheduler and DAG processor live."""
    try:
        parts = ask(address, "monitor/health")
    except OSError:
        return False
    return all(parts[name]["status"] == "healthy" for name in ("scheduler", "dag_processor"))


def ask(address: str, path: str, body: object = None) -> Any:
    """The answer of the REST API, to what is posted if there is a body."""
    return json.loads(answer(f"{address}/api/v2/{path}", body))


def trigger(address: str, dag: str, days: str) -> None:
    """Begin a run of some days."""
    ask(address, f"dags/{dag}/dagRuns", {"logical_date": None, "conf": {"days": days}})


@dataclass(frozen=True)
class Ended:
    """A run of a DAG that has ended, and of which day it was."""

    dag: str
    day: str | None
    state: str
    seconds: float

    def __str__(self) -> str:
        """In one line."""
        of_day = f" {self.day}" if self.day else ""
        return f"{self.dag}{of_day}: {self.state} in {self.seconds:.0f} s"


def ended_runs(address: str, tag: str) -> dict[tuple[str, str], Ended]:
    """The newest runs of the DAGs of a line that have ended, the oldest first."""
    runs = ask(address, "dags/~/dagRuns?limit=100&order_by=-end_date")["dag_runs"]
    return {
        (run["dag_id"], run["dag_run_id"]): Ended(
            run["dag_id"], run["partition_key"], run["state"], run["duration"]
        )
        for run in reversed(runs)
        if run["end_date"] and run["dag_id"].startswith(f"{tag}_")
    }


def follow(
    address: str, tag: str, running: Airflow, before: Collection[tuple[str, str]]
) -> Iterator[Ended]:
    """Each run of the DAGs of a line as it ends, for as long as Airflow runs.

    `before` are the runs that had ended earlier.
    """
    seen = set(before)
    while running.is_running:
        time.sleep(5)
        with suppress(OSError):
            for key, run in ended_runs(address, tag).items():
                if key not in seen:
                    seen.add(key)
                    yield run
