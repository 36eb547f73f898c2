"""A GEM of a manifest's sizes, spread over the processes that there are."""

import numpy as np
import numpy.typing as npt
import torch
from torchrec.distributed.types import ShardingType

from etl.tables.lake import Lake
from features.inputs import USER, Features
from training.config import ALONE, SpreadOptions, TrainConfig
from training.data.reader import Reader
from training.loop.average import averaged
from training.loop.checkpoint import Manifest, Trained
from training.loop.compute import prepare
from training.loop.expiry import Asked
from training.loop.step import GemModel
from training.model.gem import Gem
from training.model.lookup import ItemRows, table_rows
from training.parallel.dense import spread
from training.parallel.mesh import mesh_of
from training.parallel.replicas import Replicas
from training.parallel.sparse import TorchrecTables, adagrad, shard

WHOLE = (ShardingType.TABLE_WISE,)
BY_ROWS = (*WHOLE, ShardingType.ROW_WISE)


def newest_reader(lake: Lake, config: TrainConfig) -> Reader:
    """A reader of the newest tables, of what a configuration reads."""
    return Reader.newest(lake, config.sequence, config.max_length, config.surfaces)


def build(
    features: Features,
    manifest: Manifest,
    known: npt.NDArray[np.bool_],
    options: SpreadOptions = ALONE,
) -> Trained:
    """A fresh model of a manifest's sizes, spread over the processes of the group.

    `known` (I) tells the items that it has learned of, or is going to.
    """
    config, sizes = manifest.training, manifest.training.sizes
    mesh = mesh_of(options.groups)
    items = ItemRows(config.item_rows, torch.from_numpy(known))
    torch.manual_seed(config.seed)
    core = Gem(features, sizes)
    rows = table_rows(features, config.item_rows, sizes.user_rows)
    optimizer = adagrad(config.sparse_rate, options.moment_scale or options.groups)
    kinds = BY_ROWS if options.by_rows else WHOLE
    tables = shard(TorchrecTables(rows, sizes.row_width, (USER,)), mesh, optimizer, kinds)
    asked = Asked.never(tables, rows)
    average = averaged(core)
    prepare(core, config.compute)
    dense = spread(core, average, mesh, options.dense == "sharded")
    model = GemModel(core, dense, asked, items, sizes.user_rows, sizes.item_dropout)
    adamw = torch.optim.AdamW(
        core.parameters(), lr=config.dense_rate, weight_decay=config.weight_decay, fused=True
    )
    copies = Replicas(tables, mesh, options.average_every)
    return Trained(model, average, tables, copies, asked, adamw, manifest)
