"""What is learned from a batch: cross-entropies of labels, and of what else is asked for.

B batch, O objectives.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from etl.errors import UserError
from training.config import TrainConfig
from training.data.batch import Batch
from training.data.thinning import Thinning
from training.model.gem import Output


@dataclass(frozen=True)
class Loss:
    """`weights` (O) of the objectives, and `rarer` (O): ln of the share of negatives that is kept.

    Where a share s of the negatives is kept, the odds there are those of all rows over s: the
    loss is of logits less ln s, and the logits themselves stay those of all rows, exactly.
    """

    weights: Tensor
    rarer: Tensor
    value: float
    next_action: float

    @classmethod
    def of(cls, config: TrainConfig, objectives: Sequence[str]) -> "Loss":
        """As configured. Raises UserError for a name that is no objective."""
        weights = each(config.weights, objectives, "--weights")
        shares = each(config.negatives, objectives, "--negatives")
        sizes = config.sizes
        rarer = torch.tensor(shares).log()
        return cls(torch.tensor(weights), rarer, sizes.value, sizes.sequence.next_action)

    def among(self, logits: Tensor) -> Tensor:
        """Logits (B, O) of the rows that are learned from."""
        return logits - self.rarer

    def __call__(self, output: Output, batch: Batch, rows: float) -> Tensor:
        """The sum over a batch, over `rows`."""
        logits = self.among(output.logits)
        loss = masked_loss(logits, batch.labels, batch.known * self.weights, rows)
        if output.worth:
            each = output.worth.loss(batch.values) * (batch.known & (batch.labels > 0))
            loss = loss + self.value * each.sum() / rows
        if output.next_action is not None:
            loss = loss + self.next_action * output.next_action
        return loss


def thinning(config: TrainConfig, objectives: Sequence[str]) -> Thinning | None:
    """Which negatives are learned from; None for all."""
    if not config.negatives:
        return None
    return Thinning(tuple(each(config.negatives, objectives, "--negatives")), config.seed)


def each(told: Mapping[str, float], objectives: Sequence[str], option: str) -> list[float]:
    """A number for each objective, 1 where none is told. Raises UserError for an unknown name."""
    unknown = sorted(set(told) - set(objectives))
    if unknown:
        raise UserError(
            f"{option} names {', '.join(unknown)}; objectives are {', '.join(objectives)}"
        )
    return [told.get(name, 1.0) for name in objectives]


def masked_loss(logits: Tensor, labels: Tensor, weights: Tensor, rows: float) -> Tensor:
    """Sum of cross-entropies by their weights, 0 where a label is not known, over `rows`.

    All are (B, O).
    """
    found = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return (found * weights).sum() / rows
