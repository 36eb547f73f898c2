"""A standalone Spark cluster on this machine: a master and workers, each a process of its own."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyspark

from etl.jars import delta_jars
from tests.conftest import ROOT

HOME = Path(pyspark.__file__).parent
ENV = os.environ | {
    "SPARK_HOME": str(HOME),
    "SPARK_LOCAL_IP": "127.0.0.1",
    "PYSPARK_PYTHON": sys.executable,
    "PYTHONPATH": str(ROOT),
}
DEADLINE = 180


@dataclass(frozen=True)
class Cluster:
    """A running cluster: the URL of its master, its workers, where jobs write what happens."""

    url: str
    workers: list[subprocess.Popen[bytes]]
    events: Path

    def submit(self, words: list[str]) -> subprocess.Popen[str]:
        """Start a step by spark-submit, on all cores of the cluster."""
        settings = {
            "spark.eventLog.dir": self.events.as_uri(),
            "spark.driver.host": "127.0.0.1",
            "spark.executor.memory": "1g",
            "spark.sql.shuffle.partitions": "8",
            "spark.databricks.delta.snapshotPartitions": "2",
            "spark.network.timeout": "30s",
            "spark.network.timeoutInterval": "10s",
            "spark.executor.heartbeatInterval": "5s",
        }
        flags = [word for key, value in settings.items() for word in ("--conf", f"{key}={value}")]
        submit = Path(sys.executable).with_name("spark-submit")
        jars = ",".join(map(str, delta_jars()))
        return subprocess.Popen(
            [submit, "--master", self.url, "--properties-file", "conf/spark/cluster.conf",
             "--jars", jars, *flags, *words], cwd=ROOT, text=True, env=ENV,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip


@contextmanager
def cluster(folder: Path, workers: int) -> Iterator[Cluster]:
    """A cluster of workers with one core and a gigabyte each; stopped and gone afterwards."""
    running = []
    events = folder / "events"
    events.mkdir()
    try:
        master = ["deploy.master.Master", "--host", "127.0.0.1", "--port", "0"]
        running.append(_start(folder, "master", [*master, "--webui-port", "0"]))
        url = _told(folder / "master.log", r"Starting Spark master at (spark://\S+)")
        for number in range(workers):
            name = f"worker-{number}"
            words = ["--host", "127.0.0.1", "--cores", "1", "--memory", "1g", "--webui-port", "0"]
            words += ["--work-dir", str(folder / name), url]
            running.append(_start(folder, name, ["deploy.worker.Worker", *words]))
            _told(folder / f"{name}.log", "Successfully registered with (master)")
        yield Cluster(url, running[1:], events)
    finally:
        for process in running:
            kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and its executors at once, as a machine that loses its power."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _start(folder: Path, name: str, words: list[str]) -> subprocess.Popen[bytes]:
    command = [str(HOME / "bin" / "spark-class"), f"org.apache.spark.{words[0]}", *words[1:]]
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=ENV, start_new_session=True)


def _told(log: Path, pattern: str) -> str:
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        found = re.search(pattern, log.read_text())
        if found:
            return found[1]
        time.sleep(0.1)
    raise AssertionError(f"{log}: {log.read_text()[-2000:]}")
