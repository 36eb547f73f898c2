"""One step of training: look up, forward, masked loss, backward, update."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

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


class NonFiniteLossError(ArithmeticError):
    """The loss of a step is not finite on the processes `ranks`; no process was updated."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(f"the loss is not finite on processes {ranks}")
        self.ranks = ranks


def train_step(
    model: GemModel, batch: Batch, rows: float, optimizer: torch.optim.Optimizer, loss: Loss
) -> Output:
    """Update on a batch; returns the output from before the update.

    `rows` is the mean of the batches of all processes, whose gradients are averaged. Tables update
    themselves in the backward pass. Raises NonFiniteLossError on every process where the loss of
    any is not finite: one that stopped alone would leave the others waiting in collectives.
    """
    output = model(batch)
    found = loss(output, batch, rows)
    ranks = ranks_where(~torch.isfinite(found))
    if ranks:
        raise NonFiniteLossError(ranks)
    optimizer.zero_grad(set_to_none=True)
    found.backward()
    optimizer.step()
    return output


def ranks_where(flag: Tensor) -> list[int]:
    """The processes on which a flag () is set, in order; the same answer on each of them."""
    flags = torch.zeros(dist.get_world_size(), dtype=torch.int32, device=flag.device)
    flags[dist.get_rank()] = flag
    if len(flags) > 1:
        dist.all_reduce(flags)
    ranks: list[int] = flags.nonzero().flatten().tolist()
    return ranks
