"""Embedding tables on torchrec: sharded over processes, row-wise AdaGrad in the backward pass."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.distributed import _remote_device  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingEnv2D, ShardingPlan, ShardingType

from training.parallel.mesh import REPLICATE, SHARD

EPS = 1e-8
INITIAL = 0.05  # half width of the uniform distribution that rows start from


class TorchrecTables(nn.Module):
    """The tables of `training.model.lookup.Tables` as one torchrec collection.

    Those that are named `blank` start from zero: a row that was never learned tells nothing.
    """

    def __init__(self, rows: dict[str, int], width: int, blank: Collection[str] = ()) -> None:
        super().__init__()
        configs = [
            EmbeddingConfig(
                name=name,
                embedding_dim=width,
                num_embeddings=count,
                feature_names=[name],
                init_fn=nn.init.zeros_ if name in blank else _uniform,
            )
            for name, count in rows.items()
        ]
        self.names, self.blank = list(rows), frozenset(blank)
        self.collection = EmbeddingCollection(tables=configs, device=torch.device("cpu"))

    def forward(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        """All ids of all tables in one look-up: one ragged sample with a key a table."""
        values = torch.cat([ids[name] for name in self.names])
        lengths = torch.tensor([len(ids[name]) for name in self.names])
        found = self.collection(KeyedJaggedTensor(self.names, values, lengths=lengths))
        return {name: found[name].values() for name in self.names}


def _uniform(weight: Tensor) -> None:
    nn.init.uniform_(weight, -INITIAL, INITIAL)


def parts_of(values: DTensor) -> list[tuple[int, Tensor]]:
    """What this process holds of a table or of its state: the first row, and the rows (n, …)."""
    local: Any = values.to_local()  # torchrec's LocalShardsWrapper
    offsets = [int(offset[0]) for offset in local.local_offsets()]
    return list(zip(offsets, local.local_shards(), strict=False))


def weights_of(tables: DistributedModelParallel) -> list[Tensor]:
    """The weights (n, d) of all that this process holds."""
    return [rows for weight in tables.state_dict().values() for _, rows in parts_of(weight)]


def states_of(tables: DistributedModelParallel) -> list[Tensor]:
    """The optimizer's state (n) of all that this process holds."""
    states = tables.fused_optimizer.state_dict()["state"].values()
    return [part for state in states for values in state.values() for _, part in parts_of(values)]


@torch.no_grad()
def renew(tables: DistributedModelParallel, rows: Mapping[str, Tensor]) -> None:
    """Rows of each table as if they had never been learned; their optimizer's state too.

    Each process does this to the rows that it holds.
    """
    blank = tables.module.blank
    states = tables.fused_optimizer.state_dict()["state"]
    for key, weight in tables.state_dict().items():
        name = key.split(".")[-2]
        for first, held in parts_of(weight):
            here = _within(rows[name], first, len(held))
            new = held.new_empty(len(here), held.shape[1])
            (nn.init.zeros_ if name in blank else _uniform)(new)
            held[here] = new
        for state in states.get(key, {}).values():
            for first, held in parts_of(state):
                held[_within(rows[name], first, len(held))] = 0.0


def _within(rows: Tensor, first: int, count: int) -> Tensor:
    """Which rows of a table are among `count` from the first on, counted from there."""
    return rows[(rows >= first) & (rows < first + count)] - first


class Sharder(EmbeddingCollectionSharder):
    """On a CPU, too, a table may be cut by rows."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Whole tables, or rows of them."""
        return [ShardingType.TABLE_WISE.value, ShardingType.ROW_WISE.value]


def adagrad(learning_rate: float, moment_scale: float = 1.0) -> dict[str, Any]:
    """Row-wise AdaGrad whose steps are those of a state v / c, c the `moment_scale`.

    rate g / (sqrt(v / c) + eps) = rate sqrt(c) g / (sqrt(v) + eps sqrt(c)). Averaged over M groups,
    a row that one group alone has seen has M times too small a state for its steps; c = M makes up
    for that (2508.03854), and makes the steps of a row that all have seen sqrt(M) larger.
    """
    root = math.sqrt(moment_scale)
    return {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "learning_rate": learning_rate * root,
        "eps": EPS * root,
    }


def shard(
    tables: TorchrecTables,
    mesh: DeviceMesh,
    fused: Mapping[str, Any],
    kinds: Sequence[ShardingType] = (ShardingType.TABLE_WISE,),
) -> DistributedModelParallel:
    """Spread tables over the processes of a group as the planner says, and again in each group.

    `fused` is the optimizer of the backward pass; `kinds` are the ways in which a table may be cut.
    """
    sharder = Sharder(fused_params=dict(fused))
    allowed = ParameterConstraints(
        sharding_types=[kind.value for kind in kinds],
        compute_kernels=[EmbeddingComputeKernel.FUSED.value],
    )
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=mesh[SHARD].size(), compute_device="cpu"),
        constraints=dict.fromkeys(tables.names, allowed),
    )
    plan = planner.plan(tables, [sharder])
    _place(plan, mesh)
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


def _place(plan: ShardingPlan, mesh: DeviceMesh) -> None:
    """A plan of the first processes becomes one of this process's group."""
    mine = mesh.mesh[mesh.get_local_rank(REPLICATE)].tolist()
    for module in plan.plan.values():
        for parameter in module.values():
            parameter.ranks = [mine[rank] for rank in parameter.ranks]
            for part in parameter.sharding_spec.shards:
                part.placement = _remote_device(f"rank:{mine[part.placement.rank()]}/cpu")
