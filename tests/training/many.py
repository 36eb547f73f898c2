"""GEM on several processes, for a few steps of plain SGD; and functions run in processes."""

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, multiprocessing
from torch.multiprocessing.spawn import ProcessContext, start_processes
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardingType

from etl.tables.lake import Lake
from features.schema import USER_TABLE, FeatureSchema
from tests.conftest import FIRST, LAST
from training.config import TrainConfig
from training.data.batch import Batch, Shuffle
from training.data.label_window import LabelWindow
from training.distributed.communication import CommunicationCounter, LookupCounter
from training.distributed.dense import clip_gradients, parallelize
from training.distributed.process_group import build_mesh
from training.distributed.replicas import ReplicaSync
from training.distributed.sharding import (
    TorchrecTables,
    local_shards,
    reset_all_rows,
    shard_tables,
)
from training.model.config import SCALES
from training.model.embeddings import item_row_map_up_to, table_sizes
from training.model.gem import Gem
from training.precision.linear import apply_precision_map, linear_sites
from training.precision.precision_map import PrecisionMap, RecipeName
from training.precision.valve import SafetyValve
from training.trainer.average import EmaModel
from training.trainer.state import TABLE_WISE, latest_reader
from training.trainer.step import GemModel, Loss

SIZES = SCALES["tiny"].model_copy(update={"user_hash_buckets": 64})
ITEMS = 128
JOIN_TIMEOUT_S = 180
SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5}


@dataclass(frozen=True)
class Parallelism:
    """How a model of an interaction module is distributed over the processes."""

    replica_groups: int = 1
    sync_every: int = 1
    sharded: bool = False
    sharding_types: tuple[ShardingType, ...] = TABLE_WISE
    max_norm: float | None = None
    interaction: str = "wukong"
    recipe: RecipeName | None = None  # of all products that a map can name


@dataclass(frozen=True)
class TrainingResult:
    """Mean losses of the steps, the tables after them, and counts of bytes and look-ups.

    `initial` are the tables before the first step, `reset` after all rows were reset; `touched` are
    the rows that this process looked up, by step and table; `fallbacks` the layers that the safety
    valve changed.
    """

    losses: list[float]
    tables: dict[str, Tensor]
    bytes_sent: dict[str, int]
    ids: int
    initial: dict[str, Tensor]
    reset: dict[str, Tensor]
    touched: list[dict[str, Tensor]]
    fallbacks: list[str]


@dataclass
class RecordedLookups:
    """Tables that record the rows (n) of each look-up, by table."""

    tables: LookupCounter
    rows: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        """Look up the ids of each table."""
        for name, table_ids in ids.items():
            known = self.rows.get(name, table_ids[:0])
            self.rows[name] = torch.cat((known, table_ids)).unique()
        return self.tables(ids)


def some_batches(lake: Lake, count: int) -> tuple[FeatureSchema, list[Batch]]:
    """Small batches of the first day, with labels."""
    reader = latest_reader(lake, TrainConfig(scale="tiny"))
    window = LabelWindow(0, lake.spec.day_end(LAST), include_auxiliary=True)
    batches = reader.batches([FIRST], window, 24, Shuffle(0))
    return reader.features, [next(batches) for _ in range(count)]


def train(
    features: FeatureSchema,
    steps: Sequence[Sequence[Batch]],
    parallelism: Parallelism,
    rank: int,
    world: int,
) -> TrainingResult:
    """Train on the batches of several steps; those of a step are divided among the processes."""
    mesh = build_mesh(parallelism.replica_groups)
    torch.manual_seed(0)
    core = Gem(features, SIZES.model_copy(update={"interaction": parallelism.interaction})).eval()
    rows = table_sizes(features, ITEMS, SIZES.user_hash_buckets)
    torchrec_tables = TorchrecTables(rows, SIZES.embedding_dim, (USER_TABLE,))
    tables = shard_tables(torchrec_tables, mesh, SGD, parallelism.sharding_types)
    initial = all_rows(tables, rows)
    reset_all_rows(tables, seed=1, accumulator=0.0)
    reset = all_rows(tables, rows)
    init_equally(tables)
    names = [name for name, _ in linear_sites(core)] if parallelism.recipe else []
    recipes = PrecisionMap.uniform(names, parallelism.recipe or "fp32")
    apply_precision_map(core, recipes)
    valve = SafetyValve(core, recipes)
    dense = parallelize(core, EmaModel(core), mesh, parallelism.sharded)
    items = item_row_map_up_to(ITEMS)
    lookups = LookupCounter(tables)
    recorded = RecordedLookups(lookups)
    model = GemModel(core, dense, recorded, items, SIZES.user_hash_buckets)
    loss = Loss.from_config(TrainConfig(scale="tiny"), features)
    sgd = torch.optim.SGD(core.parameters(), lr=0.1)
    replica_sync = ReplicaSync(tables, mesh, parallelism.sync_every)
    losses, touched = [], []
    with CommunicationCounter() as communication:
        for number, step in enumerate(steps, 1):
            mean_rows = sum(map(len, step)) / len(step)
            own = step[rank::world]
            sgd.zero_grad()
            with valve.watch(0):
                losses_of_batches = [loss(model(batch), batch, mean_rows) for batch in own]
                step_loss = torch.stack(losses_of_batches).mean()
                step_loss.backward()
            if parallelism.max_norm:
                clip_gradients(core.parameters(), parallelism.max_norm)
            sgd.step()
            replica_sync.after_step(number)
            losses.append(step_loss.detach())
            touched.append(dict(recorded.rows))
            recorded.rows.clear()
    mean_losses = torch.stack(losses)
    dist.all_reduce(mean_losses)
    return TrainingResult(
        losses=(mean_losses / world).tolist(),
        tables=all_rows(tables, rows),
        bytes_sent=dict(communication.bytes),
        ids=lookups.ids,
        initial=initial,
        reset=reset,
        touched=touched,
        fallbacks=list(valve.precision_map.fallbacks),
    )


@torch.no_grad()
def init_equally(tables: DistributedModelParallel) -> None:
    """Initialize rows by table and position alone, however the tables are sharded."""
    for key, weight in tables.state_dict().items():
        generator = torch.Generator().manual_seed(crc32(key.encode()))
        rows = torch.randn(weight.shape, generator=generator) * 0.05
        for shard in local_shards(weight):
            shard.rows.copy_(rows[shard.first_row : shard.first_row + len(shard.rows)])


@torch.no_grad()
def all_rows(tables: DistributedModelParallel, rows: dict[str, int]) -> dict[str, Tensor]:
    """All rows of all tables."""
    vectors: dict[str, Tensor] = tables({name: torch.arange(count) for name, count in rows.items()})
    return vectors


def run(
    target: Callable[..., None], arguments: tuple[Any, ...], processes: int, join: bool = True
) -> ProcessContext:
    """Run `target(rank, *arguments)` in several processes.

    They are forked from a server that has imported this module, so they start fast. Raises
    TimeoutError if they have not ended after JOIN_TIMEOUT_S, as when one waits in a collective that
    another never calls.
    """
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([__name__])  # read when the server starts
    # Pickled here, because each tensor that multiprocessing shares takes a file descriptor.
    call = pickle.dumps((target, arguments))
    context: ProcessContext = start_processes(
        call_pickled, (call,), nprocs=processes, join=False, start_method="forkserver"
    )
    if join:
        join_or_kill(context)
    return context


def join_or_kill(context: ProcessContext) -> None:
    """Wait for all processes; kill them and raise TimeoutError after JOIN_TIMEOUT_S."""
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while not context.join(timeout=max(0.0, deadline - time.monotonic())):
        if time.monotonic() >= deadline:
            for child in context.processes:
                child.kill()
            raise TimeoutError(f"the processes have not ended after {JOIN_TIMEOUT_S} s")


def call_pickled(rank: int, call: bytes) -> None:
    """Run a pickled call in one of the processes."""
    target, arguments = pickle.loads(call)
    target(rank, *arguments)


def train_and_save(
    rank: int,
    world: int,
    features: FeatureSchema,
    steps: Sequence[Sequence[Batch]],
    variants: Sequence[Parallelism],
    folder: str,
) -> None:
    """Train with each variant in one of several processes, and save the results."""
    init_method = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method, rank=rank, world_size=world)
    torch.set_num_threads(1)
    results = [train(features, steps, variant, rank, world) for variant in variants]
    torch.save([vars(result) for result in results], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def train_on_processes(
    features: FeatureSchema,
    steps: Sequence[Sequence[Batch]],
    variants: Sequence[Parallelism],
    folder: Path,
    world: int,
) -> list[list[TrainingResult]]:
    """The results of all processes, for each variant."""
    folder.mkdir()
    run(train_and_save, (world, features, steps, variants, str(folder)), world)
    by_process = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]
    return [
        [TrainingResult(**result) for result in results]
        for results in zip(*by_process, strict=True)
    ]
