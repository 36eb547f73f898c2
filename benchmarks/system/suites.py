"""Suites of system benchmarks; `--only` selects parts of a suite.

`gemline bench simulator`: speed of the simulator on the `bench` configuration.
`gemline bench data`: cost of building and reading tables, compared with alternatives.
`gemline bench model`: training throughput of GEM's blocks on one thread.
`gemline bench operations`: cost of daily pipeline runs, of restarts, and of several processes.
`gemline bench serving`: latency of rankers, and consistency of online and offline features.
"""

import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated

import tyro
from tqdm import tqdm

from benchmarks.harness import BENCH_SIMULATOR, BenchmarkResult, require_known
from benchmarks.system.serving_args import ServingArgs
from etl.cli.runner import read_yaml_mapping
from etl.spec.base import StrictModel

DATA_COLUMNS = ("what", "ours", "baseline", "ratio", "goal")
MODEL_COLUMNS = ("what", "ours", "limit", "share", "goal")
OPERATIONS_COLUMNS = ("what", "ours", "baseline", "ratio", "goal")
SERVING_COLUMNS = ("what", "ours", "baseline", "goal")


def selected_parts(parts: Collection[str], only: Sequence[str]) -> Iterator[str]:
    """The names in `only`, or all if it is empty, with a progress bar.

    Raises UserError if there is no part of a name.
    """
    require_known(only, parts)
    progress = tqdm([name for name in parts if not only or name in only], unit="part")
    for name in progress:
        progress.set_description(name)
        yield name


@contextmanager
def shown_at_the_end(result: BenchmarkResult, as_json: bool) -> Iterator[None]:
    """Shows the result afterwards; if a part fails, that of the parts before it."""
    try:
        yield
    finally:
        if result.rows or result.figures:
            result.show(as_json)


class SimulatorBenchArgs(StrictModel):
    """Arguments of the benchmark."""

    repeats: int = 3
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench_simulator(args: SimulatorBenchArgs) -> None:
    """Seconds to write a million simulated events, compressed, with their true probabilities."""
    import pyarrow.parquet as pq

    from etl.simulator.config import SimulatorConfig
    from etl.simulator.simulate import simulate

    config = SimulatorConfig(**read_yaml_mapping(BENCH_SIMULATOR))
    seconds = []
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            simulate(config, Path(folder, "raw"))
            seconds.append(time.perf_counter() - start)
            files = sorted(Path(folder, "raw", "truth").glob("*.parquet"))
            impressions = sum(pq.read_metadata(path).num_rows for path in files)
            size = sum(p.stat().st_size for p in Path(folder, "raw").rglob("*") if p.is_file())
    events = config.users * config.events_per_user_mean
    seconds_per_million = median(seconds) / events * 1e6
    result = BenchmarkResult(
        "The simulator", ("events, about", "ad impressions", "MB on disk", "s per million")
    )
    result.rows.append(
        (f"{events:,}", f"{impressions:,}", f"{size / 1e6:.0f}", f"{seconds_per_million:.1f}")
    )
    result.figures = {"seconds_a_million_events": round(seconds_per_million, 2), "events": events}
    result.show(args.as_json)


class DataBenchArgs(StrictModel):
    """Arguments of the benchmark."""

    only: Annotated[tuple[str, ...], tyro.conf.arg(help="parts to run; all without")] = ()
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench_data(args: DataBenchArgs) -> None:
    """Histories, storage, the reader, counters and joins, compared with alternatives."""
    os.environ.setdefault("GEMLINE_SPARK_MASTER", "local[2]")
    from benchmarks.system import etl_speed, history_storage, joins, reader_memory, table_builds
    from etl.runtime.spark import spark_session

    parts: dict[str, Callable[..., None]] = {
        "pipeline": etl_speed.measure_pipeline,
        "demo": etl_speed.measure_demo_etl,
        "etl": etl_speed.measure_etl_speed,
        "history": table_builds.measure_history_build,
        "storage": history_storage.measure_storage,
        "reading": history_storage.measure_reader,
        "reader_memory": reader_memory.measure_reader_memory,
        "counters": joins.measure_counters,
        "hot_key": joins.measure_hot_key,
        "asof": joins.measure_asof_join,
    }
    result = BenchmarkResult("The data plane", DATA_COLUMNS)
    with shown_at_the_end(result, args.as_json), tempfile.TemporaryDirectory() as folder:
        for name in selected_parts(parts, args.only):
            if name not in ("pipeline", "demo", "reader_memory"):  # which need no Spark here
                spark_session("bench data")
            parts[name](result, Path(folder))


class ModelBenchArgs(StrictModel):
    """Arguments of the benchmark."""

    only: Annotated[tuple[str, ...], tyro.conf.arg(help="parts to run; all without")] = ()
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench_model(args: ModelBenchArgs) -> None:
    """All of GEM, Wukong, sequence stacks, request-shaped training, resume, spec changes, GPU."""
    import torch

    from benchmarks.system import (
        device_readiness,
        gem_training,
        gpu,
        model_blocks,
        request_shape,
        restarts,
        warm_start,
    )
    from training.distributed.process_group import retain_freed_memory

    torch.set_num_threads(1)
    retain_freed_memory()
    parts: dict[str, Callable[..., None]] = {
        "gem": gem_training.measure_gem_training,
        "wukong": model_blocks.measure_wukong,
        "sequence": model_blocks.measure_sequence,
        "requests": request_shape.measure_request_shape,
        "resume": restarts.measure_resume,
        "device": device_readiness.measure_device_readiness,
        "spec": warm_start.measure_spec_changes,
        "gpu": gpu.measure_gpu,
    }
    result = BenchmarkResult("The model, training on one thread", MODEL_COLUMNS)
    with shown_at_the_end(result, args.as_json):
        for name in selected_parts(parts, args.only):
            parts[name](result)


class OperationsBenchArgs(StrictModel):
    """Arguments of the benchmark."""

    only: Annotated[tuple[str, ...], tyro.conf.arg(help="parts to run; all without")] = ()
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


def bench_operations(args: OperationsBenchArgs) -> None:
    """DAG parsing, backfills, warm starts, effective training time and 2D parallelism."""
    from benchmarks.system import daily_runs, distributed, restarts

    parts: dict[str, Callable[..., None]] = {
        "parse": daily_runs.measure_dag_parsing,
        "backfill": daily_runs.measure_backfill,
        "warm": restarts.measure_warm_start,
        "increment": daily_runs.measure_increment,
        "replicas": distributed.measure_2d_parallelism,
        "balance": distributed.measure_load_balance,
    }
    result = BenchmarkResult(
        "Daily pipeline runs, and training on several processes", OPERATIONS_COLUMNS
    )
    with shown_at_the_end(result, args.as_json):
        for name in selected_parts(parts, args.only):
            parts[name](result)


def bench_serving(args: ServingArgs) -> None:
    """One request, the service under load, and a replay of logged requests."""
    from benchmarks.system import online_features, request_load, scoring

    parts: dict[str, Callable[..., None]] = {
        "program": scoring.measure_scoring,
        "counters": online_features.measure_counter_cost,
        "batch": scoring.measure_batch_scoring,
        "service": request_load.measure_service_load,
        "replay": online_features.measure_online_offline,
    }
    result = BenchmarkResult(f"Serving rankers of {args.lake}", SERVING_COLUMNS)
    with shown_at_the_end(result, args.as_json):
        for name in selected_parts(parts, args.only):
            parts[name](args, result)
