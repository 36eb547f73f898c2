"""A loss that is no number: at which step, on which batch, and what is not finite."""

import json
from collections.abc import Iterator

import torch
from torch import Tensor

from etl.errors import UserError
from etl.tables import whole
from etl.tables.place import Place
from training.data.batch import Batch
from training.loop.checkpoint import Trained
from training.loop.step import GemModel
from training.model.lookup import look_up

FILE = "diverged.json"


class DivergedError(UserError):
    """The loss is no longer a number."""


def diverged(folder: Place, trained: Trained, batch: Batch) -> DivergedError:
    """What to raise; the manifest of the batch, with its impressions, is written to a folder."""
    manifest, path = trained.manifest, folder / FILE
    told = manifest.model_dump(mode="json") | {"impressions": batch.impressions.tolist()}
    with whole.file(path) as beside:
        beside.write_text(json.dumps(told, indent=1))
    named = ", ".join(culprits(trained.model, batch)) or "nothing but the loss itself"
    return DivergedError(
        f"the loss is no number at step {manifest.steps + 1}, batch {manifest.batches + 1} of "
        f"{manifest.trained_until}; not finite: {named}. The batch is told in {path}; go on with "
        "a lower --dense-rate or --sparse-rate, the last checkpoint is kept"
    )


@torch.no_grad()
def culprits(model: GemModel, batch: Batch) -> list[str]:
    """The features of a batch, the rows of tables and the weights that are not finite, by name."""
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
