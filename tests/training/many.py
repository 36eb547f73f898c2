"""GEM on several processes, a few steps of plain SGD: what it lost, what it learned, what moved."""

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, multiprocessing
from torch.multiprocessing import ProcessContext
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardingType

from etl.tables.lake import Lake
from features.inputs import USER, Features
from tests.conftest import FIRST, LAST
from training.build import WHOLE, newest_reader
from training.config import TrainConfig
from training.data.batch import Batch
from training.data.parts import Shuffle
from training.data.ripened import Ripened
from training.loop.average import averaged
from training.loop.loss import Loss
from training.loop.step import GemModel
from training.model.config import SCALES
from training.model.gem import Gem
from training.model.lookup import ItemRows, table_rows
from training.parallel.dense import spread
from training.parallel.mesh import mesh_of
from training.parallel.moved import Counted, Moved
from training.parallel.replicas import Replicas
from training.parallel.sparse import TorchrecTables, parts_of, shard

SIZES = SCALES["tiny"].model_copy(update={"user_rows": 64})
ITEMS = 128
JOIN_TIMEOUT_S = 180
SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5}


@dataclass(frozen=True)
class Way:
    """How a model lies on the processes."""

    groups: int = 1
    every: int = 1
    sharded: bool = False
    kinds: tuple[ShardingType, ...] = WHOLE


@dataclass(frozen=True)
class Learned:
    """Mean losses of the steps; tables as they are after them; bytes that this process sent."""

    losses: list[float]
    tables: dict[str, Tensor]
    moved: dict[str, int]
    ids: int


def some_batches(lake: Lake, count: int) -> tuple[Features, list[Batch]]:
    """Small batches of the first day, with labels."""
    reader = newest_reader(lake, TrainConfig(scale="tiny"))
    ripe = Ripened(0, lake.spec.day_end(LAST))
    found = reader.batches([FIRST], ripe, 24, Shuffle(0))
    return reader.features, [next(found) for _ in range(count)]


def learn(
    features: Features, steps: Sequence[Sequence[Batch]], way: Way, rank: int, world: int
) -> Learned:
    """Learn from batches of several steps, those of a step spread over the processes."""
    mesh = mesh_of(way.groups)
    torch.manual_seed(0)
    core = Gem(features, SIZES).eval()
    rows = table_rows(features, ITEMS, SIZES.user_rows)
    tables = shard(TorchrecTables(rows, SIZES.row_width, (USER,)), mesh, SGD, way.kinds)
    begin_alike(tables)
    dense = spread(core, averaged(core), mesh, way.sharded)
    items = ItemRows(ITEMS, torch.ones(100_000, dtype=torch.bool))
    counted = Counted(tables)
    model = GemModel(core, dense, counted, items, SIZES.user_rows, 0.0)
    loss = Loss.of(TrainConfig(scale="tiny"), features.objectives)
    sgd, copies = torch.optim.SGD(core.parameters(), lr=0.1), Replicas(tables, mesh, way.every)
    losses = []
    with Moved() as moved:
        for step in steps:
            mean_rows = sum(map(len, step)) / len(step)
            mine = step[rank::world]
            found = torch.stack([loss(model(batch), batch, mean_rows) for batch in mine]).mean()
            sgd.zero_grad()
            found.backward()
            sgd.step()
            copies.stepped()
            losses.append(found.detach())
    together = torch.stack(losses)
    dist.all_reduce(together)
    return Learned((together / world).tolist(), whole(tables, rows), dict(moved.bytes), counted.ids)


@torch.no_grad()
def begin_alike(tables: DistributedModelParallel) -> None:
    """Rows that depend on their table and place alone, wherever they lie."""
    for key, weight in tables.state_dict().items():
        generator = torch.Generator().manual_seed(crc32(key.encode()))
        rows = torch.randn(weight.shape, generator=generator) * 0.05
        for first, held in parts_of(weight):
            held.copy_(rows[first : first + len(held)])


def whole(tables: DistributedModelParallel, rows: dict[str, int]) -> dict[str, Tensor]:
    """All rows of all tables."""
    with torch.no_grad():
        return tables({name: torch.arange(count) for name, count in rows.items()})


def run(
    target: Callable[..., None], arguments: tuple, processes: int, join: bool = True
) -> ProcessContext:
    """Run `target(rank, *arguments)` in so many processes.

    They are forked from a server that has imported this module, so each begins at once. Raises
    TimeoutError where they have not ended after JOIN_TIMEOUT_S, as when one waits in a collective
    that another never calls.
    """
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([__name__])  # read when the server starts
    # As bytes: tensors that are shared take a file descriptor each, and a fork has few.
    call = pickle.dumps((target, arguments))
    context = multiprocessing.start_processes(
        unpickled, (call,), nprocs=processes, join=False, start_method="forkserver"
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


def unpickled(rank: int, call: bytes) -> None:
    """Make a pickled call in one of the processes."""
    target, arguments = pickle.loads(call)
    target(rank, *arguments)


def process(
    rank: int,
    world: int,
    features: Features,
    steps: Sequence[Sequence[Batch]],
    ways: Sequence[Way],
    folder: str,
) -> None:
    """One of several processes: learn in several ways, and keep what came of each."""
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=world)
    torch.set_num_threads(1)
    found = [learn(features, steps, way, rank, world) for way in ways]
    torch.save([vars(one) for one in found], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def together(
    features: Features,
    steps: Sequence[Sequence[Batch]],
    ways: Sequence[Way],
    folder: Path,
    world: int,
) -> list[list[Learned]]:
    """What each process came to, in each way."""
    folder.mkdir()
    run(process, (world, features, steps, ways, str(folder)), world)
    kept = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]
    return [[Learned(**one) for one in of_way] for of_way in zip(*kept, strict=True)]
