"""CPU seconds that Airflow needs to read the DAGs, beyond importing what they are built from."""

import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from benchmarks.result import Result

ROOT = Path(__file__).parents[2]
ROUNDS = 3
READ = """
import time
from airflow.sdk import DAG, Asset, CronPartitionTimetable, PartitionedAssetTimetable, task
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.providers.standard.hooks.subprocess import SubprocessHook
imported = time.process_time()
import dags.daily
print("SECONDS", imported, time.process_time() - imported)
"""


def measure(result: Result) -> None:
    """`dag_parse_cpu_s`: the median of three processes."""
    env = os.environ | {
        "GEMLINE_SPEC": str(ROOT / "conf/specs/simulator.yaml"),
        "GEMLINE_RAW": "raw",
        "GEMLINE_LAKE": "lake",
        "GEMLINE_FIRST_DAY": "2026-01-01",
    }
    found = [_seconds(env) for _ in range(ROUNDS)]
    imported, ours = (median(column) for column in zip(*found, strict=True))
    result.take("dag_parse_cpu_s", ours, "")
    result.rows.append(
        ("reading five DAGs", f"{ours:.2f} s CPU", f"{imported:.2f} s Airflow's imports", "", "< 2")
    )


def _seconds(env: dict[str, str]) -> tuple[float, float]:
    done = subprocess.run(
        [sys.executable, "-c", READ], env=env, cwd=ROOT, check=True, capture_output=True, text=True
    )
    (told,) = (line for line in done.stdout.splitlines() if line.startswith("SECONDS"))
    imported, ours = map(float, told.split()[1:])
    return imported, ours
