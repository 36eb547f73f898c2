"""Embedding tables on torchrec: sharded over processes, row-wise AdaGrad in the backward pass."""

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingEnv, ShardingType

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


@torch.no_grad()
def renew(tables: DistributedModelParallel, rows: Mapping[str, Tensor]) -> None:
    """Rows (n) of each table as if they had never been learned; their optimizer's state too.

    Each process does this to the tables that it holds.
    """
    blank = tables.module.blank
    states = tables.fused_optimizer.state_dict()["state"]
    for key, weight in tables.state_dict().items():
        name = key.split(".")[-2]
        for part in weight.local_shards():
            new = part.tensor.new_empty(len(rows[name]), part.tensor.shape[1])
            (nn.init.zeros_ if name in blank else _uniform)(new)
            part.tensor[rows[name]] = new
        for state in states.get(key, {}).values():
            for part in state.local_shards():
                part.tensor[rows[name]] = 0.0


def shard(tables: TorchrecTables, learning_rate: float) -> DistributedModelParallel:
    """Spread tables over the processes of the default group, whole tables to each."""
    fused = {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "learning_rate": learning_rate,
        "eps": 1e-8,
    }
    sharder = EmbeddingCollectionSharder(fused_params=fused)
    whole = ParameterConstraints(
        sharding_types=[ShardingType.TABLE_WISE.value],
        compute_kernels=[EmbeddingComputeKernel.FUSED.value],
    )
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device="cpu"),
        constraints=dict.fromkeys(tables.names, whole),
    )
    plan = planner.plan(tables, [sharder])
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return DistributedModelParallel(
        tables,
        env=env,
        device=torch.device("cpu"),
        plan=plan,
        sharders=[sharder],
        init_data_parallel=False,
    )
