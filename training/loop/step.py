"""One step of training: look up, forward, masked loss, backward, update."""

from dataclasses import dataclass

import torch
from torch import nn

from training.data.batch import Batch
from training.loop.loss import Loss
from training.model.gem import Gem, Output
from training.model.lookup import ItemRows, Tables, look_up


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


def train_step(
    model: GemModel, batch: Batch, rows: float, optimizer: torch.optim.Optimizer, loss: Loss
) -> Output | None:
    """Update on a batch; returns what was put out before the update.

    `rows` is the mean of the batches of all processes, whose gradients are averaged. Tables update
    themselves in the backward pass. Where the loss is no number nothing is updated: None.
    """
    output = model(batch)
    found = loss(output, batch, rows)
    if not torch.isfinite(found):
        return None
    optimizer.zero_grad(set_to_none=True)
    found.backward()
    optimizer.step()
    return output
