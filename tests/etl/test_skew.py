"""Neither a bot with a fifth of all events nor a large partition makes one task do all the work."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from etl.spec import load_spec
from etl.tables import schemas, spark_io
from etl.tables.lake import Lake
from tests.conftest import ROOT
from tests.etl.shop import shop_lake
from tests.pipeline import rows

pytestmark = pytest.mark.spark

EVENTS, USERS, ITEMS, DAY = 400_000, 4_000, 2_000, "2026-01-01"
START = 1_767_225_600
EVENT_CAP = 2_000
SPEC = f"""
name: skewed
buckets: 4
max_events_per_user_day: {EVENT_CAP}
surfaces: {{home: {{}}}}
events:
  shown: {{role: impression}}
  click: {{role: outcome}}
objectives:
  click: {{event: click, window: 1h}}
sequences: {{behaviour: {{}}}}
counters: {{windows: [1h, 1d], events: [shown, click], keys: [[user], [item]]}}
sources:
  log:
    kind: event_log
    format: parquet
    path: "{{day}}.parquet"
    time_unit: s
    columns: {{event_id: id, user: user, item: item, surface: page, type: type, event_time: ts,
              ingest_time: ts, impression: id}}
"""
STEPS = """
import json, sys
from datetime import date
from pathlib import Path
from etl.runtime.spark import spark_session
from etl.spec import load_spec
from etl.tables.lake import Lake
from tests.pipeline import build_tables

raw, day = Path(sys.argv[1]), date.fromisoformat(sys.argv[2])
spark = spark_session("skew")
lake = Lake(str(raw / "lake"), load_spec(raw / "spec.yaml"))
build_tables(lake, raw, (day, day))
store = spark.sparkContext._jsc.sc().statusStore()
jobs = store.jobsList(None)
stages = {jobs.apply(i).stageIds().apply(k) for i in range(jobs.size())
          for k in range(jobs.apply(i).stageIds().size())}
memory, seconds = 0, 0.0
for stage in stages:
    tasks = store.taskList(stage, 0, 1000)
    for i in range(tasks.size()):
        metrics = tasks.apply(i).taskMetrics()
        if metrics.isDefined():
            memory = max(memory, metrics.get().peakExecutionMemory())
            seconds = max(seconds, metrics.get().executorRunTime() / 1000)
print(json.dumps({"bytes": memory, "seconds": seconds}))
"""


def build(folder: Path, bot_share: float) -> dict[str, float]:
    """Build the tables of a log with a bot; returns the largest memory and time of a task."""
    rng = np.random.default_rng(0)
    user = rng.integers(1, USERS, EVENTS)
    user[: int(bot_share * EVENTS)] = 0
    seconds = START + np.sort(rng.integers(0, 86_400, EVENTS))
    table = pa.table({
        "id": [f"e{i}" for i in range(EVENTS)],
        "user": [f"u{u}" for u in rng.permutation(user)],
        "item": [f"i{i}" for i in rng.integers(0, ITEMS, EVENTS)],
        "page": ["home"] * EVENTS,
        "type": np.where(rng.random(EVENTS) < 0.9, "shown", "click"),
        "ts": seconds,
    })  # fmt: skip
    folder.mkdir()
    pq.write_table(table, folder / f"{DAY}.parquet")
    (folder / "spec.yaml").write_text(SPEC)
    command = [sys.executable, "-c", STEPS, str(folder), DAY]
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    largest: dict[str, float] = json.loads(process.stdout.splitlines()[-1])
    return largest


@pytest.mark.proof
def test_the_events_of_a_bot_are_capped_and_do_not_skew_tasks(tmp_path: Path) -> None:
    even = build(tmp_path / "even", 0.0)
    skewed = build(tmp_path / "skewed", 0.2)
    print(f"largest task: {even} without, {skewed} with the bot", flush=True)
    lake = Lake(str(tmp_path / "skewed" / "lake"), load_spec(tmp_path / "skewed" / "spec.yaml"))
    (metrics,) = rows(lake, "ingest_metrics")
    num_excluded = int(0.2 * EVENTS) - EVENT_CAP
    assert (metrics["excluded"], metrics["kept"]) == (num_excluded, EVENTS - num_excluded)
    reasons = {row["reason"] for row in rows(lake, "excluded_events")}
    assert reasons == {f"more than {EVENT_CAP:,} events of a user and day"}
    assert skewed["bytes"] <= 1.5 * even["bytes"]
    assert skewed["seconds"] <= 2 * even["seconds"], "one task does the work of all"


def test_a_large_partition_is_written_to_several_files_by_size(
    spark: SparkSession, tmp_path: Path
) -> None:
    lake = shop_lake(tmp_path)
    schema = schemas.items(lake.spec)
    columns = (
        "'item' || id AS item_id",
        "CAST(id + 16 AS int) AS item_index",
        f"date'{DAY}' AS day",
    )
    frame = spark.range(0, 200_000, 1, 4).selectExpr(*columns)
    settings = {
        "spark.sql.adaptive.enabled": "true",
        "spark.sql.adaptive.advisoryPartitionSizeInBytes": "256KB",
    }
    before = {name: str(spark.conf.get(name)) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        spark_io.replace_partitions(lake, schema, frame, f"day = '{DAY}'", {})
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)
    files = [pq.read_table(path) for path in Path(lake.table_uri("items")).rglob("*.parquet")]
    assert len(files) > 2
    for file in files:
        indexes = file["item_index"].to_pylist()
        assert indexes == sorted(indexes)
    stored = sorted(index for file in files for index in file["item_index"].to_pylist())
    assert stored == list(range(16, 200_016))
