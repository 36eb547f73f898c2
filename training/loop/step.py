"""One step of training: look up, forward, masked loss, backward, update."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from etl.errors import UserError
from training.data.batch import Batch
from training.model.gem import Gem, Output
from training.model.lookup import ItemRows, Tables, look_up


class DivergedError(UserError):
    """The loss is no longer a number."""


@dataclass
class GemModel:
    """GEM and its tables: `dense` is wrapped when there are many processes, `core` never is.

    `users` are the rows of their table, `dropout` the share of items that are made unknown.
    """

    core: Gem
    dense: nn.Module
    tables: Tables
    items: ItemRows
    users: int
    dropout: float

    def __call__(self, batch: Batch) -> Output:
        """Logits and embeddings of a batch."""
        dropout = self.dropout if self.core.training else 0.0
        found = self.core.find(batch)
        vectors = look_up(self.tables, batch, found.positions, self.items, dropout, self.users)
        output: Output = self.dense(batch, found, vectors)
        return output


def masked_loss(logits: Tensor, labels: Tensor, known: Tensor, rows: float) -> Tensor:
    """Sum of the cross-entropies of the labels that are known, all (B, O), over `rows`."""
    each = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return (each * known).sum() / rows


def train_step(
    model: GemModel, batch: Batch, rows: float, optimizer: torch.optim.Optimizer
) -> Tensor:
    """Update on a batch; returns its logits from before the update.

    `rows` is the mean of the batches of all processes, whose gradients are averaged. Tables update
    themselves in the backward pass. Raises DivergedError on a NaN.
    """
    output = model(batch)
    loss = masked_loss(output.logits, batch.labels, batch.known, rows)
    if not torch.isfinite(loss):
        raise DivergedError(
            f"the loss is {loss.item()}: go on with a lower --dense-rate or --sparse-rate; the "
            "last checkpoint is kept"
        )
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return output.logits.detach()
