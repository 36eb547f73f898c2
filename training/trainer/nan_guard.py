"""Reports of a loss that is not finite: the step, the batch and the non-finite tensors."""

import json
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from etl.errors import UserError
from etl.tables import atomic_io
from etl.tables.uri import StoragePath
from training.data.batch import Batch
from training.model.embeddings import lookup_embeddings
from training.trainer.state import Manifest, TrainState
from training.trainer.step import GemModel

REPORT_FILE = "non_finite_loss.json"


def non_finite_loss_error(
    folder: StoragePath, state: TrainState, batch: Batch, ranks: Sequence[int]
) -> UserError:
    """The error to raise on every process if the loss is not finite on the processes `ranks`.

    The first of these processes writes a description of its batch to a file in `folder`. A
    collective call: processes look up embeddings for each other.
    """
    manifest, path = state.manifest, folder / REPORT_FILE
    tensors_by_rank: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(tensors_by_rank, non_finite_tensors(state.model, batch))
    if dist.get_rank() == ranks[0]:
        content = manifest.model_dump(mode="json") | {"impressions": batch.impression_ids.tolist()}
        atomic_io.write_text(path, json.dumps(content, indent=1))
    dist.barrier()
    names = dict.fromkeys(name for rank in ranks for name in tensors_by_rank[rank])
    process = f" of process {', '.join(map(str, ranks))}" if len(tensors_by_rank) > 1 else ""
    return UserError(
        f"the loss{process} is not finite at step {manifest.steps + 1}, batch "
        f"{manifest.batches + 1} of {manifest.trained_until}; not finite: "
        f"{', '.join(names) or 'the loss alone'}. The batch is described in {path}; lower "
        f"--dense-lr or --embedding-lr and {_next_run(manifest)}"
    )


def _next_run(manifest: Manifest) -> str:
    """What to run with other rates, under which all of `--days` are trained again."""
    day = manifest.trained_until
    if day == manifest.first_training_day:
        return "run again, which starts from the beginning"
    day_before = day - timedelta(days=1)
    return f"run again with --days from {day} on, which continues the GEM until {day_before}"


@torch.no_grad()
def non_finite_tensors(model: GemModel, batch: Batch) -> list[str]:
    """Names of the features, embeddings and weights that are not finite in a batch."""
    history = model.core.select_history(batch)
    vectors = lookup_embeddings(
        model.tables, batch, history.positions, model.item_rows, user_buckets=model.user_rows
    )
    inputs = {
        **batch.user_vectors,
        **batch.row_vectors,
        **batch.context_vectors,
        **batch.history.item_vectors,
    }
    tables = {
        name: rows
        for part in (vectors.users, vectors.candidates, vectors.events)
        for name, rows in part.items()
    }
    named_tensors: dict[str, Iterator[tuple[str, Tensor]]] = {
        "feature": iter(inputs.items()),
        "table": iter(tables.items()),
        "weight": model.core.named_parameters(),
    }
    return [
        f"{kind} {name}"
        for kind, tensors in named_tensors.items()
        for name, tensor in tensors
        if not torch.isfinite(tensor).all()
    ]
