"""2D beside 1D on four processes: a day learned by row-wise AdaGrad, and the bytes that it moves.

2D: two groups hold the tables once each, and average them every fourth step. Both see the same
batches. Noise is that of seeds.
"""

import logging
import os
import tempfile
from pathlib import Path
from statistics import mean, stdev

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.demo import SPEC, place_in, run_here, write_logs
from benchmarks.result import Result
from dags.line import data_steps
from etl.spec import load_spec
from etl.spec.units import parse_days
from etl.tables.lake import Lake
from training.build import build, newest_reader
from training.config import SpreadOptions, TrainConfig
from training.day import Day
from training.loop.checkpoint import Manifest
from training.loop.loss import Loss
from training.loop.step import train_step
from training.model.lookup import table_rows
from training.parallel.moved import Counted, Moved, exchanged
from training.parallel.processes import in_step

DAY = "2026-01-01"
WORLD = {"users": 500, "days": 1}
PROCESSES, SEEDS, EVERY = 4, 3, 4
WAYS = {"1D": SpreadOptions(), "2D": SpreadOptions(groups=2, average_every=EVERY)}


def measure(result: Result) -> None:
    """`loss_2d_within_noise`, and `bytes_2d_as_formula`."""
    os.environ.setdefault("GEMLINE_SPARK_MASTER", "local[2]")
    with tempfile.TemporaryDirectory() as work:
        place = place_in(work)
        write_logs(Path(place.raw), WORLD)
        run_here(data_steps(place, ("--days", DAY)))
        spawn(_process, (place.lake, work), nprocs=PROCESSES)
        found = [
            torch.load(Path(work, f"{rank}.pt"), weights_only=True) for rank in range(PROCESSES)
        ]
    losses = {way: [found[0]["loss"][way][seed] for seed in range(SEEDS)] for way in WAYS}
    apart = mean(losses["2D"]) - mean(losses["1D"])
    noise = 2 * (sum(stdev(of_way) ** 2 for of_way in losses.values()) / SEEDS) ** 0.5
    moved, formula = (sum(one[what] for one in found) for what in ("moved", "formula"))
    result.figures["loss_2d_within_noise"] = abs(apart) <= noise
    result.figures["bytes_2d_as_formula"] = moved == formula
    told = {way: f"loss {mean(of_way):.4f}" for way, of_way in losses.items()}
    result.rows.append(
        ("2D, 4 processes", told["2D"], f"1D {told['1D']}; noise {noise:.4f}", f"{apart:+.4f}", "0")
    )
    result.rows.append(
        ("bytes of a 2D run", f"{moved:,}", f"{formula:,} by formula", "", "the same")
    )


def _process(rank: int, root: str, work: str) -> None:
    torch.set_num_threads(1)
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    dist.init_process_group("gloo", f"file://{work}/meet", rank=rank, world_size=PROCESSES)
    lake = Lake(root, load_spec(SPEC))
    loss: dict[str, list[float]] = {way: [] for way in WAYS}
    for way, options in WAYS.items():
        for seed in range(SEEDS):
            mean_loss, moved, formula = _learn(lake, options, seed)
            loss[way].append(mean_loss)
    torch.save({"loss": loss, "moved": moved, "formula": formula}, Path(work, f"{rank}.pt"))
    dist.destroy_process_group()


def _learn(lake: Lake, options: SpreadOptions, seed: int) -> tuple[float, int, int]:
    """The mean loss before each step of a day; bytes that this process sent, and should have."""
    config = TrainConfig(scale="tiny", seed=seed, batch_rows=64)
    reader, (day, _) = newest_reader(lake, config), parse_days(DAY)
    start = _start(lake, config, reader.events)
    trained = build(reader.features, start, reader.items.known_by(day), options)
    counted = trained.asked.tables = Counted(trained.tables)
    loss = Loss.of(config, reader.features.objectives)
    of_day, rank = Day(lake, reader, day, start), dist.get_rank()
    losses = []
    with Moved() as moved:
        for batch, rows in in_step(of_day.of(rank, PROCESSES), of_day.spare(rank)):
            output = train_step(trained.model, batch, rows, trained.optimizer, loss)
            losses.append(loss(output, batch, rows).detach())
            trained.replicas.stepped()
    together = torch.stack(losses).mean()
    dist.all_reduce(together)
    sizes = config.sizes
    tables = len(table_rows(reader.features, config.item_rows, sizes.user_rows))
    group = PROCESSES // options.groups
    told = exchanged(counted.calls, counted.ids, tables, sizes.row_width, group)
    return float(together) / PROCESSES, moved.bytes["alltoall_base"], told


def _start(lake: Lake, config: TrainConfig, events: tuple[str, ...]) -> Manifest:
    day, _ = parse_days(DAY)
    return Manifest(
        spec=lake.spec.hash, match=lake.spec.match, events=events, training=config,
        processes=PROCESSES, versions={}, trained_from=day, trained_until=day, complete=False,
        batches=0, steps=0,
    )  # fmt: skip
