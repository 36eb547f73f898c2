"""Speed of the whole ETL, beside a plain parse, sort and write of the same files.

The plain job is one of Spark and, for information, one of DuckDB.
"""

import shutil
from functools import partial
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.types import StringType, StructField, StructType

from benchmarks.harness import BENCH_SIMULATOR, BenchmarkResult, interleaved_median_seconds
from benchmarks.pipelines import (
    DEMO_DAYS,
    SMALL_SIMULATION,
    pipeline_paths_in,
    run_steps_in_process,
    simulate_logs,
)
from benchmarks.system.joins import THREADS
from dags.pipeline import data_steps
from dags.runner import run_pipeline
from dags.steps import PipelinePaths
from etl.spec import load_spec
from etl.spec.sources import EventLogSource
from etl.tables import arrow, schemas, step_state
from etl.tables.lake import Lake

ROUNDS = 2  # in opposite orders
DAYS = "2026-01-01:2026-01-05"
USERS = {1: 800, 3: 2400}  # by about how many million records their logs of DAYS have


def measure_etl_speed(result: BenchmarkResult, work: Path) -> None:
    """`etl_share_of_plain` and `etl_growth`, on about one and three million records.

    The first compares the seconds that two million more records take: plain over the whole ETL. The
    second is the records per second of the large logs over those of the small ones. Each is
    timed twice, and the mean counts; the plain job runs first in one round and second in the other.
    `etl_share_of_duckdb`, for information, compares with the plain job in DuckDB, in one process.
    """
    warm_up = pipeline_paths_in(str(work / "etl-warm-up"))
    simulate_logs(Path(warm_up.raw), SMALL_SIMULATION | {"days": 5}, BENCH_SIMULATOR)
    sort_and_write(warm_up)
    build_tables(warm_up)
    records: dict[int, int] = {}
    times: dict[str, dict[int, float]] = {"etl": {}, "plain": {}, "duckdb": {}}
    for millions, users in USERS.items():
        paths = pipeline_paths_in(str(work / f"etl-{millions}"))
        simulate_logs(Path(paths.raw), {"users": users, "days": 5}, BENCH_SIMULATOR)
        variants = {
            "plain": partial(sort_and_write, paths),
            "duckdb": partial(sort_and_write_in_duckdb, paths),
            "etl": partial(build_tables, paths),
        }
        for name, seconds in interleaved_median_seconds(variants, ROUNDS).items():
            times[name][millions] = seconds
        records[millions] = count_records(paths)
        shutil.rmtree(Path(paths.raw).parent)
    added = records[3] - records[1]
    ours, alternative, duckdb = (
        added / (times[name][3] - times[name][1]) for name in ("etl", "plain", "duckdb")
    )
    etl = times["etl"]
    growth = (records[3] / etl[3]) / (records[1] / etl[1])
    result.record("etl_share_of_plain", ours / alternative, "")
    result.record("etl_share_of_duckdb", ours / duckdb, "")
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
        ("… beside DuckDB", "", f"{duckdb:,.0f} parse, sort, write", f"{ours / duckdb:.2f}", "")
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


def build_tables(paths: PipelinePaths) -> None:
    """All tables from raw logs to examples, in this process and in an empty lake."""
    shutil.rmtree(paths.lake, ignore_errors=True)
    run_steps_in_process(data_steps(load_spec(paths.spec), paths, ("--days", DAYS)))


def sort_and_write(paths: PipelinePaths) -> None:
    """Parse the event logs, sort them by user and time, and write them as Parquet."""
    schema = StructType([StructField(name, StringType()) for name in raw_columns(paths)])
    logs = SparkSession.active().read.schema(schema).json(f"{paths.raw}/events/*/*.json.gz")
    rows = logs.repartition("user_id").sortWithinPartitions("user_id", "event_time")
    rows.write.mode("overwrite").parquet(f"{paths.lake}-plain")


def sort_and_write_in_duckdb(paths: PipelinePaths) -> None:
    """The same in one process, on as many threads as Spark has cores."""
    import duckdb

    columns = dict.fromkeys(raw_columns(paths), "VARCHAR")
    with duckdb.connect() as connection:
        connection.execute(f"SET threads = {THREADS}")
        logs = connection.read_json(
            f"{paths.raw}/events/*/*.json.gz",
            columns=columns,
            format="newline_delimited",
            ignore_errors=True,  # malformed records have no values, as in Spark
        )
        logs.order("user_id, event_time").write_parquet(f"{paths.lake}-duckdb.parquet")


def raw_columns(paths: PipelinePaths) -> list[str]:
    """The names of the columns of raw event logs."""
    source = load_spec(paths.spec).sources["events"]
    assert isinstance(source, EventLogSource)
    return [name for name in source.columns.model_dump().values() if isinstance(name, str)]


def count_records(paths: PipelinePaths) -> int:
    """The raw records that the ETL has read."""
    lake = Lake(paths.lake, load_spec(paths.spec))
    return sum(
        arrow.snapshot(lake, schemas.ingest_metrics(lake.spec)).read(["read"])["read"].to_pylist()
    )


def measure_demo_etl(result: BenchmarkResult, work: Path) -> None:
    """`demo_etl_seconds`: raw logs of the demo to examples, as `gemline run` does it."""
    paths = pipeline_paths_in(str(work / "demo"))
    simulate_logs(Path(paths.raw), {})
    spec = load_spec(paths.spec)
    steps = data_steps(spec, paths, ("--days", DEMO_DAYS))
    run = partial(run_pipeline, spec, paths, steps)
    seconds = interleaved_median_seconds({"demo": run}, 1)["demo"]
    result.record("demo_etl_seconds", seconds, "")
    records = count_records(paths)
    result.rows.append(
        (f"logs of the demo, {records:,} records", f"{seconds:.0f} s", "", "", "<= 60")
    )


def measure_pipeline(result: BenchmarkResult, work: Path, days: int = 5) -> None:
    """`etl_events_per_s` from raw gzip logs to examples, and `etl_largest_step_share`."""
    paths = pipeline_paths_in(str(work))
    shutil.rmtree(paths.lake, ignore_errors=True)
    simulate_logs(Path(paths.raw), {}, BENCH_SIMULATOR)
    day_flags = ("--days", f"2026-01-01:2026-01-{days:02}")
    spec = load_spec(paths.spec)
    run_pipeline(spec, paths, data_steps(spec, paths, day_flags))
    events = count_records(paths)
    seconds = dict(step_state.step_durations(paths.lake))
    total = sum(seconds.values())
    slowest_step = max(seconds, key=lambda step: seconds[step])
    largest_share = seconds[slowest_step] / total
    result.record("etl_events_per_s", events / total, "")
    result.record("etl_largest_step_share", largest_share, "")
    result.rows.append(
        (
            f"raw gzip to examples, {events:,} records",
            f"{events / total:,.0f} events/s",
            ", ".join(f"{step} {duration:.0f} s" for step, duration in seconds.items()),
            f"{slowest_step} {largest_share:.2f}",
            "<= 0.40",
        )
    )
