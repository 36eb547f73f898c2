"""Distributed training: load balance between processes, and 2D compared with 1D table parallelism.

Load balance is the cost of a step's busiest process over the mean of eight, on requests of uneven
users: 1 to 8 rows and histories of up to 2,048 events by a power law. Before: batches in the order
of the data. After: expensive requests are batched with cheap ones.

2D parallelism (two groups that each hold all tables, averaged every fourth step) trains a day on
four processes by row-wise AdaGrad, on the same batches as 1D; the noise is that of seeds.
"""

import logging
import os
import tempfile
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.harness import SIMULATOR_SPEC, BenchmarkResult
from benchmarks.pipelines import pipeline_paths_in, run_steps_in_process, simulate_logs
from dags.pipeline import data_steps
from etl.array_types import Int64
from etl.spec import load_spec
from etl.spec.units import parse_date_range
from etl.tables.lake import Lake
from training.config import ParallelismConfig, TrainConfig
from training.data.batch import Shuffle
from training.distributed.communication import (
    CommunicationCounter,
    LookupCounter,
    expected_all_to_all_bytes,
)
from training.distributed.process_group import synchronized_batches
from training.model.embeddings import table_sizes
from training.trainer.resume import DayBatches, new_manifest
from training.trainer.state import build_train_state, latest_reader
from training.trainer.step import Loss, train_step
from training.trainer.table_day import start_table_day

BALANCED_PROCESSES, BALANCED_REQUESTS, BATCH_ROWS, MAX_HISTORY_EVENTS = 8, 20_000, 128, 2048
DAY = "2026-01-01"
SIMULATOR_OVERRIDES = {"users": 500, "days": 1}
WORKERS, SEEDS, SYNC_EVERY = 4, 3, 4
PARALLELISM_CONFIGS = {
    "1D": ParallelismConfig(),
    "2D": ParallelismConfig(table_replicas=2, sync_every_steps=SYNC_EVERY),
}


def measure_load_balance(result: BenchmarkResult) -> None:
    """`load_balance_before`, `load_balance_after`: busiest over mean cost, averaged over steps."""
    costs = [_batch_costs(seed) for seed in range(BALANCED_PROCESSES)]
    before, after = (_max_over_mean(by_process) for by_process in zip(*costs, strict=True))
    result.record("load_balance_before", before, "")
    result.record("load_balance_after", after, "")
    result.rows.append(
        ("busiest of 8 processes / mean", f"{after:.3f}", f"{before:.3f} unbalanced", "", "1")
    )


def _batch_costs(seed: int) -> tuple[Int64, Int64]:
    """Cost of each batch of a process, before and after balancing."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(1, 9, BALANCED_REQUESTS)
    lengths = rng.pareto(0.7, BALANCED_REQUESTS) * 20
    events = np.minimum(lengths, MAX_HISTORY_EVENTS).astype(np.int64)
    cost = rows + events
    balanced = Shuffle(0).split(rows, events, BATCH_ROWS, seed)
    in_order = np.array_split(Shuffle(0)(np.arange(BALANCED_REQUESTS), seed), len(balanced))
    before, after = (
        np.array([cost[batch].sum() for batch in batches]) for batches in (in_order, balanced)
    )
    return before, after


def _max_over_mean(costs: tuple[Int64, ...]) -> float:
    steps = min(map(len, costs))
    by_process = np.stack([process_costs[:steps] for process_costs in costs])
    return float((by_process.max(0) / by_process.mean(0)).mean())


def measure_2d_parallelism(result: BenchmarkResult) -> None:
    """`loss_2d_within_noise`, and `bytes_2d_as_formula`."""
    os.environ.setdefault("GEMLINE_SPARK_MASTER", "local[2]")
    with tempfile.TemporaryDirectory() as work:
        paths = pipeline_paths_in(work)
        simulate_logs(Path(paths.raw), SIMULATOR_OVERRIDES)
        run_steps_in_process(data_steps(load_spec(paths.spec), paths, ("--days", DAY)))
        spawn(_worker, (paths.lake, work), nprocs=WORKERS)
        outputs = [
            torch.load(Path(work, f"{rank}.pt"), weights_only=True) for rank in range(WORKERS)
        ]
    losses: dict[str, list[float]] = outputs[0]["loss"]  # losses by seed, the same on all workers
    loss_1d, loss_2d = mean(losses["1D"]), mean(losses["2D"])
    difference = loss_2d - loss_1d
    noise = 2 * (sum(stdev(by_seed) ** 2 for by_seed in losses.values()) / SEEDS) ** 0.5
    sent, expected = (sum(output[key] for output in outputs) for key in ("sent", "expected"))
    result.figures["loss_2d_within_noise"] = abs(difference) <= noise
    result.figures["bytes_2d_as_formula"] = sent == expected
    result.rows.append(
        (
            "2D, 4 processes",
            f"loss {loss_2d:.4f}",
            f"1D loss {loss_1d:.4f}; noise {noise:.4f}",
            f"{difference:+.4f}",
            "0",
        )
    )
    result.rows.append(
        ("bytes of a 2D run", f"{sent:,}", f"{expected:,} by formula", "", "the same")
    )


def _worker(rank: int, root: str, work: str) -> None:
    """Train a day with each parallelism and seed; writes losses and bytes of the last 2D run."""
    torch.set_num_threads(1)
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    dist.init_process_group("gloo", f"file://{work}/meet", rank=rank, world_size=WORKERS)
    lake = Lake(root, load_spec(SIMULATOR_SPEC))
    losses: dict[str, list[float]] = {name: [] for name in PARALLELISM_CONFIGS}
    for name, parallelism in PARALLELISM_CONFIGS.items():
        for seed in range(SEEDS):
            loss, sent, expected = _train_day(lake, parallelism, seed)
            losses[name].append(loss)
    output = {"loss": losses, "sent": sent, "expected": expected}
    torch.save(output, Path(work, f"{rank}.pt"))
    dist.destroy_process_group()


def _train_day(lake: Lake, parallelism: ParallelismConfig, seed: int) -> tuple[float, int, int]:
    """The mean loss of a day's steps, and the bytes that this process sent and should have sent."""
    config = TrainConfig(scale="tiny", seed=seed, batch_rows=64)
    reader, (day, _) = latest_reader(lake, config), parse_date_range(DAY)
    manifest = new_manifest(lake, reader, (day, day), config)
    state = build_train_state(manifest, parallelism)
    start_table_day(state, reader.items, day)
    lookups = state.last_access.tables = LookupCounter(state.tables)
    loss = Loss.from_config(config, reader.features)
    day_batches, rank = DayBatches(lake, reader, day, manifest), dist.get_rank()
    batches = synchronized_batches(
        day_batches.for_rank(rank, WORKERS), day_batches.padding_batches(rank)
    )
    losses = []
    with CommunicationCounter() as communication:
        for batch, rows in batches:
            output = train_step(state.model, batch, rows, state.optimizer, loss)
            losses.append(loss(output, batch, rows).detach())
            state.replicas.after_step(len(losses))
    mean_loss = torch.stack(losses).mean()
    dist.all_reduce(mean_loss)
    sizes = config.gem_config
    tables = len(table_sizes(reader.features, config.item_table_rows, sizes.user_hash_buckets))
    group_size = WORKERS // parallelism.table_replicas
    expected = expected_all_to_all_bytes(
        lookups.calls, lookups.ids, tables, sizes.embedding_dim, group_size
    )
    return float(mean_loss) / WORKERS, communication.bytes["alltoall_base"], expected
