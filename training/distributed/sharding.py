"""Parallelism of GEM: a data-parallel dense part and sharded embedding tables.

The dense part is replicated (DDP) or sharded (FSDP2, HSDP). TorchRec shards the tables over
processes, with row-wise AdaGrad. With M replica groups each group trains its copy of the tables on
its own batches (local SGD), and the copies are averaged every few steps (2D sparse parallelism,
2508.03854). n rows, d table width.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.distributed import _remote_device  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingEnv2D, ShardingPlan, ShardingType
from typing_extensions import override

from training.distributed.process_group import REPLICATE, SHARD
from training.model.gem import Gem, GemOutput
from training.model.heads import ZilnDistribution

for output_type in (GemOutput, ZilnDistribution):  # FSDP searches the output for tensors
    torch.export.register_dataclass(output_type)


class FullGradientWrapper(nn.Module):
    """Gives every parameter a gradient (zero if a batch does not use it), and broadcasts buffers.

    With FSDP all processes must reduce the same gradients, although their batches differ.
    Buffers, such as running statistics, are taken from rank 0, as with DDP.
    """

    def __init__(self, core: Gem) -> None:
        super().__init__()
        self.core = core

    def forward(self, *inputs: Any) -> GemOutput:
        """The output of the model."""
        for buffer in self.core.buffers():
            dist.broadcast(buffer, 0)
        output: GemOutput = self.core(*inputs)
        zero = sum(weight.sum() for weight in self.core.parameters()) * 0.0
        return replace(output, logits=output.logits + zero)


def parallelize(core: Gem, ema: AveragedModel, mesh: DeviceMesh, sharded: bool) -> nn.Module:
    """Wrap a GEM for the processes of a mesh; its moving average is sharded the same way.

    Without `sharded` every process has all weights (DDP). With it each shard group holds them once
    (FSDP); several groups are replicas of each other (HSDP). With one process the model is
    returned unchanged.
    """
    if mesh.size() == 1:
        return core
    if not sharded:
        return DistributedDataParallel(core, find_unused_parameters=True)
    fsdp_mesh = mesh[SHARD] if mesh[REPLICATE].size() == 1 else mesh
    for model in (core, ema.module):
        fully_shard(model, mesh=fsdp_mesh)
    return FullGradientWrapper(core)


EPS = 1e-8
INIT_RANGE = 0.05  # rows are initialized uniformly from -0.05 to 0.05


class TorchrecTables(nn.Module):
    """`training.model.embeddings.EmbeddingTables` as one TorchRec collection.

    Tables in `zero_init` are initialized with zeros, so that untrained rows have no effect.
    """

    def __init__(
        self, table_sizes: dict[str, int], width: int, zero_init: Collection[str] = ()
    ) -> None:
        super().__init__()
        configs = [
            EmbeddingConfig(
                name=name,
                embedding_dim=width,
                num_embeddings=count,
                feature_names=[name],
                init_fn=nn.init.zeros_ if name in zero_init else _init_uniform,
            )
            for name, count in table_sizes.items()
        ]
        self.names, self.zero_init = list(table_sizes), frozenset(zero_init)
        self.collection = EmbeddingCollection(tables=configs, device=torch.device("cpu"))

    def forward(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        """Look up the ids of all tables at once, as one ragged sample with a key for each table."""
        values = torch.cat([ids[name] for name in self.names])
        lengths = torch.tensor([len(ids[name]) for name in self.names])
        embeddings = self.collection(KeyedJaggedTensor(self.names, values, lengths=lengths))
        return {name: embeddings[name].values() for name in self.names}


def _init_uniform(weight: Tensor) -> None:
    nn.init.uniform_(weight, -INIT_RANGE, INIT_RANGE)


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


@torch.no_grad()
def reset_rows(
    tables: DistributedModelParallel,
    rows: Mapping[str, Tensor],
    accumulator: float = 0.0,
    values: Mapping[str, Tensor] | None = None,
) -> None:
    """Reinitialize some rows of each table, and their optimizer state, on all processes.

    Each process resets the rows that it holds.

    Args:
        tables: The tables.
        rows: Rows (n) by table name.
        accumulator: Optimizer state of a reset row.
        values: Vector (d) of the reset rows, by table name; others are drawn at random.
    """
    zero_init, values = tables.module.zero_init, values or {}
    states = tables.fused_optimizer.state_dict()["state"]
    for key, weight in tables.state_dict().items():
        name = key.split(".")[-2]
        if name not in rows:
            continue
        for shard in local_shards(weight):
            local_rows = _rows_in_shard(rows[name], shard)
            fresh = shard.rows.new_empty(len(local_rows), shard.rows.shape[1])
            (nn.init.zeros_ if name in zero_init else _init_uniform)(fresh)
            shard.rows[local_rows] = values[name].to(fresh) if name in values else fresh
        for state in states.get(key, {}).values():
            for shard in local_shards(state):
                shard.rows[_rows_in_shard(rows[name], shard)] = accumulator


def reset_all_rows(tables: DistributedModelParallel, accumulator: float) -> None:
    """Reinitialize all rows of all tables, and their optimizer state, on all processes."""
    rows = {
        key.split(".")[-2]: torch.arange(weight.shape[0])
        for key, weight in tables.state_dict().items()
    }
    reset_rows(tables, rows, accumulator)


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


class CpuEmbeddingSharder(EmbeddingCollectionSharder):
    """Allows row-wise sharding on a CPU, which TorchRec offers on a GPU only."""

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
) -> DistributedModelParallel:
    """Shard tables over the processes of a group by TorchRec's planner, identically in each group.

    Args:
        tables: The tables.
        mesh: Replica groups and the processes of each; see `build_mesh`.
        fused_params: Optimizer that the backward pass applies.
        sharding_types: How the planner may shard a table.
    """
    sharder = CpuEmbeddingSharder(fused_params=dict(fused_params))
    allowed = ParameterConstraints(
        sharding_types=[sharding.value for sharding in sharding_types],
        compute_kernels=[EmbeddingComputeKernel.FUSED.value],
    )
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=mesh[SHARD].size(), compute_device="cpu"),
        constraints=dict.fromkeys(tables.names, allowed),
    )
    plan = planner.plan(tables, [sharder])
    _assign_ranks(plan, mesh)
    env = ShardingEnv2D(
        mesh[SHARD].get_group(), mesh[REPLICATE].get_group(), dist.group.WORLD, mesh
    )
    return DistributedModelParallel(
        tables,
        env=env,
        device=torch.device("cpu"),
        plan=plan,
        sharders=[sharder],
        init_data_parallel=False,
    )


def _assign_ranks(plan: ShardingPlan, mesh: DeviceMesh) -> None:
    """Map the ranks of a plan, which count within a group, to global ranks of this group."""
    group_ranks = mesh.mesh[mesh.get_local_rank(REPLICATE)].tolist()
    for module in plan.plan.values():
        for parameter in module.values():
            parameter.ranks = [group_ranks[rank] for rank in parameter.ranks]
            for shard in parameter.sharding_spec.shards:
                rank = group_ranks[shard.placement.rank()]
                shard.placement = _remote_device(f"rank:{rank}/cpu")


@dataclass(frozen=True)
class PendingAverage:
    """An all-reduce in progress: the local state, the copy that was sent, and the resulting sum."""

    state: Tensor
    sent: Tensor
    total: Tensor
    work: dist.Work


class ReplicaSync:
    """Averages the shards of a process over the replica groups every `sync_every` steps.

    The average of the optimizer state is applied one synchronization later, on top of the changes
    since then, so that no step waits for it.
    """

    def __init__(self, tables: DistributedModelParallel, mesh: DeviceMesh, sync_every: int) -> None:
        self.tables, self.sync_every, self.steps = tables, sync_every, 0
        self._group, self._num_replicas = mesh[REPLICATE].get_group(), mesh[REPLICATE].size()
        self._pending: list[PendingAverage] = []

    def after_step(self) -> None:
        """Count a step, and synchronize if it is due; all processes must call this."""
        self.steps += 1
        if self._num_replicas > 1 and self.steps % self.sync_every == 0:
            self._average(local_weights(self.tables))
            self._apply_pending()
            self._start_state_reduce(local_optimizer_states(self.tables))

    def synchronize(self) -> None:
        """Make weights and optimizer states of all replicas equal, e.g. before a checkpoint."""
        if self._num_replicas > 1:
            self._apply_pending()
            self._average([*local_weights(self.tables), *local_optimizer_states(self.tables)])

    def _average(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            dist.all_reduce(tensor, group=self._group)
            tensor.div_(self._num_replicas)

    def _start_state_reduce(self, states: Sequence[Tensor]) -> None:
        for state in states:
            sent, total = state.clone(), state.clone()
            work = dist.all_reduce(total, group=self._group, async_op=True)
            assert work is not None
            self._pending.append(PendingAverage(state, sent, total, work))

    def _apply_pending(self) -> None:
        with torch.no_grad():
            for pending in self._pending:
                pending.work.wait()
                pending.state.add_(pending.total / self._num_replicas - pending.sent)
        self._pending.clear()
