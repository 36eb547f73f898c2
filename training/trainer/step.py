"""One step of training: embedding lookup, forward, masked loss, backward, update.

Also the loss, and the exponential moving average (EMA) of the weights, which is used for inference:
in continuous training the learning rate is never annealed, and averaging has a similar effect.

B rows, O objectives.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from etl.errors import UserError
from training.config import TrainConfig
from training.data.batch import Batch, NegativeSampling
from training.model.embeddings import EmbeddingTables, ItemRowMap, lookup_embeddings
from training.model.gem import Gem, GemOutput

MAX_EMA_DECAY = 0.998  # about the last 500 steps


def ema_model(model: nn.Module) -> AveragedModel:
    """The EMA of a model's weights (Polyak averaging), with the latest buffers.

    The decay starts low, so that initial weights have little effect after a short training.
    """
    return AveragedModel(model, multi_avg_fn=_update_ema)


@torch.no_grad()
def _update_ema(averages: Sequence[Tensor], weights: Sequence[Tensor], steps: Tensor | int) -> None:
    """Update the averages in place; `steps` is the number of earlier updates."""
    decay = min(MAX_EMA_DECAY, (1 + int(steps)) / (10 + int(steps)))
    torch._foreach_lerp_(list(averages), list(weights), 1 - decay)


@dataclass(frozen=True)
class Loss:
    """The training loss: weighted cross-entropies, and optional value and next-action terms.

    If a share s of an objective's negatives is sampled, the odds in the sample are those of all
    rows divided by s. The loss is therefore computed on the logits minus ln s, and the logits stay
    unbiased for all rows. `log_sampling_rates` (O) are ln s.
    """

    objective_weights: Tensor
    log_sampling_rates: Tensor
    value_weight: float
    next_action_weight: float

    @classmethod
    def from_config(cls, config: TrainConfig, objectives: Sequence[str]) -> "Loss":
        """The loss of a configuration. Raises UserError if it names an unknown objective."""
        weights = per_objective(config.objective_weights, objectives, "--objective-weights")
        rates = per_objective(config.negative_sampling_rate, objectives, "--negative-sampling-rate")
        model = config.gem_config
        return cls(
            objective_weights=torch.tensor(weights),
            log_sampling_rates=torch.tensor(rates).log(),
            value_weight=model.value_loss_weight,
            next_action_weight=model.sequence.next_action_weight,
        )

    def sampled_logits(self, logits: Tensor) -> Tensor:
        """Logits (B, O) among the sampled rows, from those among all rows."""
        return logits - self.log_sampling_rates

    def __call__(self, output: GemOutput, batch: Batch, rows: float) -> Tensor:
        """The loss summed over a batch, divided by `rows`."""
        logits = self.sampled_logits(output.logits)
        loss = masked_loss(logits, batch.labels, batch.label_mask * self.objective_weights, rows)
        if output.value_distribution:
            is_positive = batch.label_mask & (batch.labels > 0)
            nll = output.value_distribution.negative_log_likelihood(batch.outcome_values)
            loss = loss + self.value_weight * (nll * is_positive).sum() / rows
        if output.next_action_loss is not None:
            loss = loss + self.next_action_weight * output.next_action_loss
        return loss


def negative_sampling(config: TrainConfig, objectives: Sequence[str]) -> NegativeSampling | None:
    """The negative sampling of a configuration; None to train on all negatives."""
    if not config.negative_sampling_rate:
        return None
    rates = per_objective(config.negative_sampling_rate, objectives, "--negative-sampling-rate")
    return NegativeSampling(tuple(rates), config.seed)


def per_objective(
    values: Mapping[str, float], objectives: Sequence[str], option: str
) -> list[float]:
    """A value for each objective, 1 by default. Raises UserError for an unknown objective."""
    unknown = sorted(set(values) - set(objectives))
    if unknown:
        raise UserError(
            f"{option} names {', '.join(unknown)}; objectives are {', '.join(objectives)}"
        )
    return [values.get(name, 1.0) for name in objectives]


def masked_loss(logits: Tensor, labels: Tensor, weights: Tensor, rows: float) -> Tensor:
    """Weighted sum of binary cross-entropies, divided by `rows`; all tensors are (B, O).

    `weights` are 0 for missing labels.
    """
    losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return (losses * weights).sum() / rows


@dataclass
class GemModel:
    """GEM with its embedding tables: from a batch to outputs.

    `core` is the dense model; `dense` is the same model, wrapped by DDP or FSDP if there are
    several processes. `user_rows` is the number of rows of the user table, and `item_dropout` the
    share of items that are replaced by the unknown item in training.
    """

    core: Gem
    dense: nn.Module
    tables: EmbeddingTables
    item_rows: ItemRowMap
    user_rows: int
    item_dropout: float

    def __call__(self, batch: Batch) -> GemOutput:
        """Logits and embeddings of a batch."""
        dropout = self.item_dropout if self.core.training else 0.0
        history = self.core.select_history(batch)
        vectors = lookup_embeddings(
            self.tables, batch, history.positions, self.item_rows, dropout, self.user_rows
        )
        return cast(GemOutput, self.dense(batch, history, vectors))


class NonFiniteLossError(ArithmeticError):
    """The loss of a step is not finite on the processes `ranks`; no process was updated."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(f"the loss is not finite on processes {ranks}")
        self.ranks = ranks


def train_step(
    model: GemModel, batch: Batch, rows: float, optimizer: torch.optim.Optimizer, loss: Loss
) -> GemOutput:
    """Update on a batch; returns the output before the update.

    `rows` is the mean number of rows over all processes, whose gradients are averaged. Embedding
    tables update themselves in the backward pass. Raises NonFiniteLossError on every process if the
    loss of any is not finite, because the others would otherwise wait in collectives.
    """
    output = model(batch)
    batch_loss = loss(output, batch, rows)
    ranks = ranks_where(~torch.isfinite(batch_loss))
    if ranks:
        raise NonFiniteLossError(ranks)
    optimizer.zero_grad(set_to_none=True)
    torch.autograd.backward(batch_loss)
    optimizer.step()
    return output


def ranks_where(flag: Tensor) -> list[int]:
    """The ranks on which a boolean scalar is true; a collective call with one result for all."""
    flags = torch.zeros(dist.get_world_size(), dtype=torch.int32, device=flag.device)
    flags[dist.get_rank()] = flag
    if len(flags) > 1:
        dist.all_reduce(flags)
    return [rank for rank, is_set in enumerate(flags.tolist()) if is_set]
