"""Training stops when the loss is not finite, and reports the step, the batch and the tensors."""

import json
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from etl.errors import UserError
from etl.tables import atomic_io
from etl.tables.place import Place
from training.data.batch import Batch
from training.loop.checkpoint import Trained
from training.loop.step import GemModel
from training.model.lookup import look_up

FILE = "non_finite_loss.json"


def report_non_finite_loss(
    folder: Place, trained: Trained, batch: Batch, ranks: Sequence[int]
) -> UserError:
    """The error to raise on every process where the loss is not finite on those of `ranks`.

    The first of them writes its batch, with the impressions, to a file in `folder`. All processes
    have to call this at the same step, as they look up rows for each other.
    """
    tensors = non_finite_tensors(trained.model, batch)
    manifest, path = trained.manifest, folder / FILE
    found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, tensors)
    if dist.get_rank() == ranks[0]:
        content = manifest.model_dump(mode="json") | {"impressions": batch.impressions.tolist()}
        atomic_io.write_text(path, json.dumps(content, indent=1))
    dist.barrier()
    names = dict.fromkeys(name for rank in ranks for name in found[rank])
    of_ranks = f" of process {', '.join(map(str, ranks))}" if len(found) > 1 else ""
    return UserError(
        f"the loss{of_ranks} is not finite at step {manifest.steps + 1}, batch "
        f"{manifest.batches + 1} of {manifest.trained_until}; not finite: "
        f"{', '.join(names) or 'the loss alone'}. The batch is described in {path}; lower "
        "--dense-rate or --sparse-rate and run again from the last checkpoint"
    )


@torch.no_grad()
def non_finite_tensors(model: GemModel, batch: Batch) -> list[str]:
    """Names of the features of a batch, rows of tables and weights that are not finite."""
    found = model.core.find(batch)
    vectors = look_up(model.tables, batch, found.positions, model.items, users=model.users)
    inputs = {**batch.row_vectors, **batch.history.item_vectors}
    tables = {
        name: rows
        for part in (vectors.users, vectors.rows, vectors.events)
        for name, rows in part.items()
    }
    kinds: dict[str, Iterator[tuple[str, Tensor]]] = {
        "feature": iter(inputs.items()),
        "table": iter(tables.items()),
        "weight": model.core.named_parameters(),
    }
    return [
        f"{kind} {name}"
        for kind, tensors in kinds.items()
        for name, tensor in tensors
        if not torch.isfinite(tensor).all()
    ]
