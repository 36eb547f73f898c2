"""The state of a training run: GEM, its tables and optimizers, placed on the processes."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.swa_utils import AveragedModel
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardingType

from etl.tables.lake import Lake
from features.schema import USER_TABLE, FeatureSchema
from training.config import SINGLE_PROCESS, ParallelismConfig, TrainConfig
from training.data.reader import ExampleReader
from training.distributed.dense import parallelize
from training.distributed.process_group import build_mesh
from training.distributed.sparse import (
    ReplicaSync,
    TorchrecTables,
    rowwise_adagrad_params,
    shard_tables,
)
from training.model.embeddings import ItemRowMap, table_sizes
from training.model.gem import Gem
from training.trainer.compute import apply_compute_config
from training.trainer.embedding_ttl import LastAccess
from training.trainer.manifest import Manifest
from training.trainer.step import GemModel, ema_model

TABLE_WISE = (ShardingType.TABLE_WISE,)
TABLE_AND_ROW_WISE = (*TABLE_WISE, ShardingType.ROW_WISE)


@dataclass
class TrainState:
    """A model with its optimizers, and the manifest with its training progress.

    `ema` holds the averaged dense weights, which are used for inference; `replicas` averages the
    copies of the tables; the optimizer of the tables is fused into `tables`.
    """

    model: GemModel
    ema: AveragedModel
    tables: DistributedModelParallel
    replicas: ReplicaSync
    last_access: LastAccess
    optimizer: torch.optim.Optimizer
    manifest: Manifest

    def state_dict(self) -> dict[str, Any]:
        """All state that the next step depends on, as tensors."""
        return {
            "dense": get_model_state_dict(self.model.core),
            "ema": self.ema.state_dict(),
            "optimizer": get_optimizer_state_dict(self.model.core, self.optimizer)["state"],
            "tables": self.tables.state_dict(),
            "tables_optimizer": self.tables.fused_optimizer.state_dict()["state"],
            "last_access": self.last_access.last_days,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; learning rates and other settings of the optimizers are kept."""
        core, fused = self.model.core, self.tables.fused_optimizer
        set_model_state_dict(core, state["dense"])
        self.ema.load_state_dict(state["ema"])
        settings = get_optimizer_state_dict(core, self.optimizer)
        set_optimizer_state_dict(core, self.optimizer, {**settings, "state": state["optimizer"]})
        self.tables.load_state_dict(state["tables"])
        fused.load_state_dict({**fused.state_dict(), "state": state["tables_optimizer"]})
        self.last_access.last_days = state["last_access"]


def latest_reader(lake: Lake, config: TrainConfig) -> ExampleReader:
    """A reader of the latest table versions, for the inputs of a configuration."""
    return ExampleReader.latest(lake, config.sequence, config.max_length, config.surfaces)


def build_train_state(
    features: FeatureSchema,
    manifest: Manifest,
    known_items: npt.NDArray[np.bool_],
    parallelism: ParallelismConfig = SINGLE_PROCESS,
) -> TrainState:
    """A newly initialized model of a manifest's configuration, on the processes of the group.

    `known_items` (I) marks the items that the model was or will be trained on; all others share the
    row of the unknown item.
    """
    config, sizes = manifest.training, manifest.training.gem_config
    mesh = build_mesh(parallelism.table_replicas)
    torch.manual_seed(config.seed)
    core = Gem(features, sizes)

    rows = table_sizes(features, config.item_table_rows, sizes.user_hash_buckets)
    tables = shard_tables(
        TorchrecTables(rows, sizes.embedding_dim, (USER_TABLE,)),
        mesh,
        rowwise_adagrad_params(
            config.embedding_lr, parallelism.moment_scale or parallelism.table_replicas
        ),
        TABLE_AND_ROW_WISE if parallelism.row_wise else TABLE_WISE,
    )
    last_access = LastAccess.never_accessed(tables, rows)

    ema = ema_model(core)
    apply_compute_config(core, config.compute)
    dense = parallelize(core, ema, mesh, parallelism.dense_parallelism == "fsdp")
    item_rows = ItemRowMap(config.item_table_rows, torch.from_numpy(known_items))
    return TrainState(
        model=GemModel(
            core, dense, last_access, item_rows, sizes.user_hash_buckets, sizes.item_dropout
        ),
        ema=ema,
        tables=tables,
        replicas=ReplicaSync(tables, mesh, parallelism.sync_every_steps),
        last_access=last_access,
        optimizer=torch.optim.AdamW(
            core.parameters(), lr=config.dense_lr, weight_decay=config.weight_decay, fused=True
        ),
        manifest=manifest,
    )
