"""A standalone Spark cluster on this machine, with a process for the master and each worker."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyspark

from etl.runtime.java import delta_jars
from tests.conftest import ROOT

SPARK_HOME = Path(pyspark.__file__).parent
ENVIRONMENT = os.environ | {
    "SPARK_HOME": str(SPARK_HOME),
    "SPARK_LOCAL_IP": "127.0.0.1",
    "PYSPARK_PYTHON": sys.executable,
    "PYTHONPATH": str(ROOT),
}
START_TIMEOUT_SECONDS = 180


@dataclass(frozen=True)
class Cluster:
    """A running cluster: the URL of its master, its workers, the folder of Spark event logs."""

    url: str
    workers: list[subprocess.Popen[bytes]]
    event_logs: Path

    def submit(
        self, application: list[str], settings: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a step by spark-submit, on all cores of the cluster, with further settings."""
        properties = {
            "spark.eventLog.dir": self.event_logs.as_uri(),
            "spark.driver.host": "127.0.0.1",
            "spark.executor.memory": "1g",
            "spark.sql.shuffle.partitions": "8",
            "spark.databricks.delta.snapshotPartitions": "2",
            "spark.network.timeout": "30s",
            "spark.network.timeoutInterval": "10s",
            "spark.executor.heartbeatInterval": "5s",
        } | dict(settings or {})
        flags = [word for key, value in properties.items() for word in ("--conf", f"{key}={value}")]
        submit = Path(sys.executable).with_name("spark-submit")
        jars = ",".join(map(str, delta_jars()))
        return subprocess.Popen(
            [submit, "--master", self.url, "--properties-file", "conf/spark/cluster.conf",
             "--jars", jars, *flags, *application], cwd=ROOT, text=True, env=ENVIRONMENT,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip


@contextmanager
def cluster(folder: Path, workers: int) -> Iterator[Cluster]:
    """A cluster of workers with one core and a gigabyte each; stopped and removed at the end."""
    running: list[subprocess.Popen[bytes]] = []
    event_logs = folder / "events"
    event_logs.mkdir()
    try:
        master = ["deploy.master.Master", "--host", "127.0.0.1", "--port", "0"]
        running.append(_start(folder, "master", [*master, "--webui-port", "0"]))
        url = _wait_for_log(folder / "master.log", r"Starting Spark master at (spark://\S+)")
        for number in range(workers):
            name = f"worker-{number}"
            words = ["--host", "127.0.0.1", "--cores", "1", "--memory", "1g", "--webui-port", "0"]
            words += ["--work-dir", str(folder / name), url]
            running.append(_start(folder, name, ["deploy.worker.Worker", *words]))
            _wait_for_log(folder / f"{name}.log", "Successfully registered with (master)")
        yield Cluster(url, running[1:], event_logs)
    finally:
        for process in running:
            kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its executors at the same time, as if the machine lost power."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _start(folder: Path, name: str, words: list[str]) -> subprocess.Popen[bytes]:
    command = [str(SPARK_HOME / "bin" / "spark-class"), f"org.apache.spark.{words[0]}", *words[1:]]
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=log, env=ENVIRONMENT, start_new_session=True
        )


def _wait_for_log(log: Path, pattern: str) -> str:
    """The first group of a pattern, once the log contains it."""
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        match = re.search(pattern, log.read_text())
        if match:
            return match[1]
        time.sleep(0.1)
    raise AssertionError(f"{log}: {log.read_text()[-2000:]}")
