"""Speed of the whole ETL, beside a plain parse, sort and write of the same files by Spark."""

import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.types import StringType, StructField, StructType

from benchmarks.harness import BENCH_SIMULATOR, DEMO_SIMULATOR, SIMULATOR_SPEC, BenchmarkResult
from benchmarks.pipelines import SMALL_SIMULATION, run_steps_in_process
from dags.pipeline import data_steps
from dags.runner import run_pipeline
from dags.steps import PipelinePaths
from etl.cli.runner import read_yaml_mapping
from etl.spec import load_spec
from etl.spec.sources import EventLogSource
from etl.tables import arrow, schemas
from etl.tables.lake import Lake

DAYS = "2026-01-01:2026-01-05"
DEMO_DAYS = "2026-01-01:2026-01-11"
USERS = {1: 800, 3: 2400}  # by about how many million records their logs of DAYS have


def measure_etl_speed(result: BenchmarkResult, work: Path) -> None:
    """`etl_share_of_plain` and `etl_growth`, on about one and three million records.

    The first compares the seconds that two million more records take: plain over the whole ETL. The
    second is the records per second of the large logs over those of the small ones.
    """
    warm_up = simulate_logs(work / "etl-warm-up", SMALL_SIMULATION | {"days": 5})
    sort_and_write(warm_up)
    build_tables(warm_up)
    records, etl, plain = {}, {}, {}
    for millions, users in USERS.items():
        paths = simulate_logs(work / f"etl-{millions}", {"users": users, "days": 5})
        plain[millions] = _seconds(partial(sort_and_write, paths))
        etl[millions] = _seconds(partial(build_tables, paths))
        records[millions] = count_records(paths)
        shutil.rmtree(Path(paths.raw).parent)
    added = records[3] - records[1]
    ours, alternative = (added / (seconds[3] - seconds[1]) for seconds in (etl, plain))
    growth = (records[3] / etl[3]) / (records[1] / etl[1])
    result.record("etl_share_of_plain", ours / alternative, "")
    result.record("etl_growth", growth, "")
    result.rows.append(
        (
            f"raw gzip to examples, from {records[1]:,} to {records[3]:,} records",
            f"{ours:,.0f} records/s",
            f"{alternative:,.0f} parse, sort, write",
            f"{ours / alternative:.2f}",
            ">= 0.35",
        )
    )
    result.rows.append(
        (
            f"… {records[3]:,} records against {records[1]:,}, with fixed costs",
            f"{records[3] / etl[3]:,.0f} records/s",
            f"{records[1] / etl[1]:,.0f}",
            f"{growth:.2f}",
            ">= 1.3",
        )
    )


def simulate_logs(folder: Path, overrides: dict[str, int]) -> PipelinePaths:
    """The logs of `gemline bench history` with some settings changed, in a new folder."""
    from etl.simulator.config import SimulatorConfig
    from etl.simulator.simulate import simulate

    simulate(SimulatorConfig(**read_yaml_mapping(BENCH_SIMULATOR) | overrides), folder / "raw")
    return PipelinePaths(SIMULATOR_SPEC, str(folder / "raw"), str(folder / "lake"))


def build_tables(paths: PipelinePaths) -> None:
    """All tables from raw logs to examples, in this process."""
    run_steps_in_process(data_steps(paths, ("--days", DAYS)))


def sort_and_write(paths: PipelinePaths) -> None:
    """Parse the event logs, sort them by user and time, and write them as Parquet."""
    source = load_spec(paths.spec).sources["events"]
    assert isinstance(source, EventLogSource)
    columns = [name for name in source.columns.model_dump().values() if isinstance(name, str)]
    schema = StructType([StructField(name, StringType()) for name in columns])
    logs = SparkSession.active().read.schema(schema).json(f"{paths.raw}/events/*/*.json.gz")
    rows = logs.repartition("user_id").sortWithinPartitions("user_id", "event_time")
    rows.write.mode("overwrite").parquet(f"{paths.lake}-plain")


def count_records(paths: PipelinePaths) -> int:
    """The raw records that the ETL has read."""
    lake = Lake(paths.lake, load_spec(paths.spec))
    return sum(
        arrow.snapshot(lake, schemas.ingest_metrics(lake.spec)).read(["read"])["read"].to_pylist()
    )


def measure_demo_etl(result: BenchmarkResult, work: Path) -> None:
    """`demo_etl_seconds`: raw logs of the demo to examples, as `gemline run` does it."""
    from etl.simulator.config import SimulatorConfig
    from etl.simulator.simulate import simulate

    simulate(SimulatorConfig(**read_yaml_mapping(DEMO_SIMULATOR)), work / "demo" / "raw")
    paths = PipelinePaths(SIMULATOR_SPEC, str(work / "demo" / "raw"), str(work / "demo" / "lake"))
    steps = data_steps(paths, ("--days", DEMO_DAYS))
    seconds = _seconds(lambda: run_pipeline(load_spec(paths.spec), paths, steps))
    result.record("demo_etl_seconds", seconds, "")
    records = count_records(paths)
    result.rows.append(
        (f"logs of the demo, {records:,} records", f"{seconds:.0f} s", "", "", "<= 60")
    )


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
