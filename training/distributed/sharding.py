"""Embedding tables that TorchRec shards over processes, with row-wise AdaGrad.

With M replica groups each group trains its copy of the tables on its own batches (local SGD), and
the copies are averaged every few steps: `training.distributed.replicas`. n rows, d table width.
"""

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.distributed import _remote_device  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingEnv2D, ShardingPlan, ShardingType
from typing_extensions import override

from training.distributed.device import mesh_device
from training.distributed.process_group import REPLICATE, SHARD

EPS = 1e-8
INIT_RANGE = 0.05  # rows are initialized uniformly from -0.05 to 0.05


class TorchrecTables(nn.Module):
    """`training.model.embeddings.EmbeddingTables` as one TorchRec collection.

    Tables in `zero_init` are initialized with zeros, so that untrained rows have no effect.
    """

    def __init__(
        self,
        table_sizes: dict[str, int],
        width: int,
        zero_init: Collection[str] = (),
        device: str = "meta",
    ) -> None:
        """Describe the tables; on `meta` they take no memory until they are sharded.

        Args:
            table_sizes: Rows of each table.
            width: Width of a row.
            zero_init: Tables that start with zeros.
            device: Where whole tables are created, if not only described.
        """
        super().__init__()

        def init_function(name: str) -> Callable[[Tensor], object]:
            return nn.init.zeros_ if name in zero_init else _init_uniform

        self.is_described = torch.device(device).type == "meta"
        configs = [
            EmbeddingConfig(
                name=name,
                embedding_dim=width,
                num_embeddings=count,
                feature_names=[name],
                init_fn=_leave if self.is_described else init_function(name),
            )
            for name, count in table_sizes.items()
        ]
        self.names, self.zero_init = list(table_sizes), frozenset(zero_init)
        self.collection = EmbeddingCollection(tables=configs, device=torch.device(device))

    def forward(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        """Look up the ids of all tables at once."""
        return self.by_table(self.collection(self.jagged_ids(ids)))

    def by_table(self, embeddings: Mapping[str, JaggedTensor]) -> dict[str, Tensor]:
        """The vectors (n, d) of each table in an output of the collection."""
        return {name: embeddings[name].values() for name in self.names}

    def jagged_ids(self, ids: Mapping[str, Tensor]) -> KeyedJaggedTensor:
        """The ids (n) of all tables as one ragged sample with a key for each table."""
        values = torch.cat([ids[name] for name in self.names])
        lengths = torch.tensor([len(ids[name]) for name in self.names], device=values.device)
        return KeyedJaggedTensor(self.names, values, lengths=lengths)


def _init_uniform(weight: Tensor) -> None:
    nn.init.uniform_(weight, -INIT_RANGE, INIT_RANGE)


def _leave(weight: Tensor) -> None:
    """Initialize nothing: `initialize_rows` does so after sharding."""


class LocalShard(NamedTuple):
    """Rows (n, …) of a table or of its optimizer state, from `first_row` on."""

    first_row: int
    rows: Tensor


def local_shards(values: DTensor) -> list[LocalShard]:
    """The shards of a table, or of its optimizer state, that this process holds."""
    local: Any = values.to_local()  # TorchRec's LocalShardsWrapper
    return [
        LocalShard(int(offset[0]), rows)
        for offset, rows in zip(local.local_offsets(), local.local_shards(), strict=False)
    ]


def local_weights(tables: DistributedModelParallel) -> list[Tensor]:
    """The weights (n, d) of all shards of this process."""
    weights = tables.state_dict().values()
    return [shard.rows for weight in weights for shard in local_shards(weight)]


def local_optimizer_states(tables: DistributedModelParallel) -> list[Tensor]:
    """The optimizer state (n) of all shards of this process."""
    states = tables.fused_optimizer.state_dict()["state"].values()
    values = [value for state in states for value in state.values()]
    return [shard.rows for value in values for shard in local_shards(value)]


INIT_BLOCK = 1024  # rows that are drawn together


@torch.no_grad()
def initialize_rows(tables: DistributedModelParallel, seed: int) -> None:
    """Initialize the rows that this process holds, by seed, table and position alone.

    The tables are the same for any number of processes and groups, and on any device.
    """
    zero_init = tables.module.zero_init
    for key, weight in tables.state_dict().items():
        name = key.split(".")[-2]
        for shard in local_shards(weight):
            if name in zero_init:
                shard.rows.zero_()
            else:
                _fill_shard(shard, f"{seed} {name}")


def _fill_shard(shard: LocalShard, key: str) -> None:
    """Draw the rows of a shard, block by block of the table."""
    stop, width = shard.first_row + len(shard.rows), shard.rows.shape[1]
    for start in range(shard.first_row - shard.first_row % INIT_BLOCK, stop, INIT_BLOCK):
        generator = torch.Generator().manual_seed(crc32(f"{key} {start}".encode()))
        block = torch.empty(INIT_BLOCK, width).uniform_(
            -INIT_RANGE, INIT_RANGE, generator=generator
        )
        first, last = max(start, shard.first_row), min(start + INIT_BLOCK, stop)
        rows = block[first - start : last - start]
        shard.rows[first - shard.first_row : last - shard.first_row] = rows


@torch.no_grad()
def reset_rows(
    tables: DistributedModelParallel,
    rows: Mapping[str, Tensor],
    accumulator: float,
    values: Mapping[str, Tensor],
) -> None:
    """Reset some rows of each table, and their optimizer state, on all processes.

    Each process resets the rows that it holds.

    Args:
        tables: The tables.
        rows: Rows (n) by table name.
        accumulator: Optimizer state of a reset row.
        values: Vector (d) of the reset rows, by table name; those of other tables become zero.
    """
    states = tables.fused_optimizer.state_dict()["state"]
    for key, weight in tables.state_dict().items():
        name = key.split(".")[-2]
        if name not in rows:
            continue
        for shard in local_shards(weight):
            reset = _rows_in_shard(rows[name], shard)
            shard.rows[reset] = values[name].to(shard.rows) if name in values else 0.0
        for state in states.get(key, {}).values():
            for shard in local_shards(state):
                shard.rows[_rows_in_shard(rows[name], shard)] = accumulator


def reset_all_rows(tables: DistributedModelParallel, seed: int, accumulator: float) -> None:
    """Initialize all rows of all tables with another seed, and reset their optimizer state.

    Each process resets the rows that it holds.
    """
    initialize_rows(tables, seed)
    fill_accumulators(tables, accumulator)


def fill_accumulators(tables: DistributedModelParallel, value: float) -> None:
    """Set the AdaGrad state of all rows; the fused optimizer always starts at zero.

    From zero, the first step moves a row by the learning rate whatever its gradient.
    """
    for state in local_optimizer_states(tables):
        state.fill_(value)


def decay_accumulators(tables: DistributedModelParallel, factor: float, floor: float) -> None:
    """Multiply the AdaGrad state of all rows by a factor, but keep it above its initial value.

    Without decay the steps of a row that is trained every day become ever smaller.
    """
    for state in local_optimizer_states(tables):
        state.mul_(factor).clamp_(min=floor)


def _rows_in_shard(rows: Tensor, shard: LocalShard) -> Tensor:
    """The given rows of a table that are in a shard, relative to its first row."""
    first, stop = shard.first_row, shard.first_row + len(shard.rows)
    return rows[(rows >= first) & (rows < stop)] - first


OTHER_MEMORY_SHARE = 0.3  # of a device, for the dense part, activations and batches


class TableSharder(EmbeddingCollectionSharder):
    """Allows the same sharding on all devices; TorchRec offers row-wise on a GPU only."""

    @override
    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Table-wise and row-wise."""
        return [ShardingType.TABLE_WISE.value, ShardingType.ROW_WISE.value]


def rowwise_adagrad_params(learning_rate: float, moment_scale: float = 1.0) -> dict[str, Any]:
    """Fused parameters of row-wise AdaGrad that divides its state v by a `moment_scale` c.

    lr g / (sqrt(v / c) + eps) = lr sqrt(c) g / (sqrt(v) + eps sqrt(c)), so no other kernel is
    needed. If only one of M groups trains a row, averaging divides its updates by M and its state
    by M, where M^2 would match: the state is M times too large, and steps are sqrt(M) times too
    small. c = M corrects that (2508.03854), and makes the steps of rows that all groups train
    sqrt(M) larger.
    """
    root = math.sqrt(moment_scale)
    return {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "learning_rate": learning_rate * root,
        "eps": EPS * root,
    }


def shard_tables(
    tables: TorchrecTables,
    mesh: DeviceMesh,
    fused_params: Mapping[str, Any],
    sharding_types: Sequence[ShardingType] = (ShardingType.TABLE_WISE,),
    seed: int = 0,
) -> DistributedModelParallel:
    """Shard tables over the processes of a group by TorchRec's planner, identically in each group.

    They are stored on the device of the mesh; of tables on `meta`, each process creates only its
    own rows.

    Args:
        tables: The tables.
        mesh: Replica groups and the processes of each; see `build_mesh`.
        fused_params: Optimizer that the backward pass applies.
        sharding_types: How the planner may shard a table.
        seed: Determines the initial rows of tables on `meta`.
    """
    sharder = TableSharder(fused_params=dict(fused_params))
    allowed = ParameterConstraints(
        sharding_types=[sharding.value for sharding in sharding_types],
        compute_kernels=[EmbeddingComputeKernel.FUSED.value],
    )
    planner = EmbeddingShardingPlanner(
        topology=build_topology(mesh),
        constraints=dict.fromkeys(tables.names, allowed),
        storage_reservation=FixedPercentageStorageReservation(OTHER_MEMORY_SHARE),
    )
    plan = planner.plan(tables, [sharder])
    _assign_ranks(plan, mesh)
    env = ShardingEnv2D(
        mesh[SHARD].get_group(), mesh[REPLICATE].get_group(), dist.group.WORLD, mesh
    )
    sharded = DistributedModelParallel(
        tables,
        env=env,
        device=mesh_device(mesh),
        plan=plan,
        sharders=[sharder],
        init_data_parallel=False,
    )
    if tables.is_described:
        initialize_rows(sharded, seed)
    return sharded


def build_topology(mesh: DeviceMesh) -> Topology:
    """What the planner knows of the processes of one group: their device and its memory."""
    size, device = mesh[SHARD].size(), mesh_device(mesh)
    if device.type == "cpu":
        return Topology(world_size=size, compute_device="cpu")
    return Topology(
        world_size=size,
        compute_device=device.type,
        hbm_cap=torch.cuda.get_device_properties(device).total_memory,
        local_world_size=max(1, min(size, processes_of_machine() // mesh[REPLICATE].size())),
    )


def processes_of_machine() -> int:
    """Number of processes on this machine; torchrun sets it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _assign_ranks(plan: ShardingPlan, mesh: DeviceMesh) -> None:
    """Map the ranks of a plan, which count within a group, to global ranks of this group."""
    group_ranks = mesh.mesh[mesh.get_local_rank(REPLICATE)].tolist()
    for module in plan.plan.values():
        for parameter in module.values():
            parameter.ranks = [group_ranks[rank] for rank in parameter.ranks]
            for shard in parameter.sharding_spec.shards:
                rank = group_ranks[shard.placement.rank()]
                shard.placement = _remote_device(_placement(rank, mesh.device_type))


def _placement(rank: int, device_type: str) -> str:
    """The device of a process, as TorchRec writes it; each process of a machine has its card."""
    if device_type == "cpu":
        return f"rank:{rank}/cpu"
    return f"rank:{rank}/{device_type}:{rank % processes_of_machine()}"
