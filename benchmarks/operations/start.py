"""The start of a training: the model is built, and learns from two batches of unlike sizes."""

from dataclasses import replace

import torch
import torch._dynamo
import torch._inductor.compile_fx  # what compiling imports, when it is first asked for

from benchmarks.model.requests import ITEMS, SPEC, random_batch
from etl.spec import load_spec
from features.inputs import features_of
from training.config import ComputeOptions, TrainConfig
from training.data.batch import Batch
from training.loop.compute import prepare
from training.loop.loss import Loss
from training.loop.step import GemModel, train_step
from training.model.config import SCALES
from training.model.gem import Gem
from training.model.lookup import first_items, table_rows
from training.parallel.mesh import mesh_of
from training.parallel.processes import process_group
from training.parallel.sparse import TorchrecTables, adagrad, shard


def start() -> None:
    """Build a GEM of the default size with compiled blocks, and step twice."""
    features, sizes = features_of(load_spec(SPEC)), SCALES["small"]
    batch = random_batch(features)
    with process_group():
        core = Gem(features, sizes)
        prepare(core, ComputeOptions(compiled=True))
        rows = table_rows(features, ITEMS, sizes.user_rows)
        tables = shard(TorchrecTables(rows, sizes.row_width), mesh_of(1), adagrad(0.05))
        model = GemModel(core, core, tables, first_items(ITEMS), sizes.user_rows, 0.0)
        optimizer = torch.optim.AdamW(core.parameters(), fused=True)
        loss = Loss.of(TrainConfig(), features.objectives)
        for found in (batch, fewer(batch)):
            train_step(model, found, len(found), optimizer, loss)


def fewer(batch: Batch) -> Batch:
    """The rows of all requests but for the last of each."""
    last = torch.cat((batch.request[1:] != batch.request[:-1], torch.tensor([True])))
    keep = ~last
    return replace(
        batch,
        request=batch.request[keep],
        surface=batch.surface[keep],
        item=batch.item[keep],
        row_ids={name: ids[keep] for name, ids in batch.row_ids.items()},
        row_numbers=batch.row_numbers[keep],
        row_vectors={name: vectors[keep] for name, vectors in batch.row_vectors.items()},
        labels=batch.labels[keep],
        known=batch.known[keep],
        values=batch.values[keep],
        impressions=batch.impressions[keep.numpy()],
    )
