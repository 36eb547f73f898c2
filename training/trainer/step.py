"""One step of training, and its loss: embedding lookup, forward, masked loss, backward, update.

B rows, O objectives, A auxiliary objectives.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from etl.errors import UserError
from features.schema import ITEM_TABLE, FeatureSchema
from training.config import TrainConfig
from training.data.batch import Batch, NegativeSampling
from training.data.history_selection import HistorySelection
from training.distributed.lookup import StartedLookup
from training.model.embeddings import (
    UNKNOWN_ITEM_ROW,
    EmbeddingTables,
    EmbeddingVectors,
    table_ids,
)
from training.model.gem import Gem, GemOutput, auxiliary_objectives
from training.teacher.predictions import TeacherPredictions

ItemRows = Callable[[Tensor], Tensor]  # item indexes (n) to rows (n) of the item table


class TrainingItemRows(Protocol):
    """`ItemRows` that count look-ups, except those that are repeated, and may drop items."""

    def __call__(self, items: Tensor, is_repeated: bool) -> Tensor:
        """Map item indexes (n) to rows (n) of the item table."""
        ...


@dataclass(frozen=True)
class Loss:
    """The training loss: weighted cross-entropies, and auxiliary, value and next-action terms.

    If a share s of an objective's negatives is sampled, the odds in the sample are those of all
    rows divided by s. The loss is therefore computed on the logits minus ln s, and the logits stay
    unbiased for all rows. `log_sampling_rates` (O) are ln s.

    The loss of auxiliary objectives, with `auxiliary_weights` (A), is the cross-entropy, and for
    those whose target `is_dwell` (A) the Huber loss of ln(1 + seconds). Rows that negative sampling
    leaves out do not count.

    With a `teacher`, the cross-entropy towards its stored probabilities is added, times
    `distillation_weight`, for the labels that it predicted.
    """

    objective_weights: Tensor
    log_sampling_rates: Tensor
    auxiliary_weights: Tensor
    is_dwell: Tensor
    value_weight: float
    next_action_weight: float
    teacher: TeacherPredictions | None = None
    distillation_weight: float = 0.0

    @classmethod
    def from_config(
        cls,
        config: TrainConfig,
        features: FeatureSchema,
        base_rates: Mapping[str, float] = {},
        teacher: TeacherPredictions | None = None,
    ) -> "Loss":
        """The loss of a configuration; objectives without a base rate are not scaled.

        Raises UserError if the configuration names an unknown objective.
        """
        objectives, model = features.objectives, config.gem_config
        names = (*objectives, *features.auxiliary_objectives)
        weights = torch.tensor(
            per_objective(config.objective_weights, names, "--objective-weights")
        )
        rates = per_objective(config.negative_sampling_rate, objectives, "--negative-sampling-rate")
        targets = auxiliary_objectives(features, model).values()
        auxiliary_weights = weights[len(objectives) :][: len(targets)]
        return cls(
            objective_weights=weights[: len(objectives)]
            * entropy_scales(objectives, base_rates, config.entropy_power),
            log_sampling_rates=torch.tensor(rates).log(),
            auxiliary_weights=model.auxiliary_weight * auxiliary_weights,
            is_dwell=torch.tensor([target == "dwell" for target in targets], dtype=torch.bool),
            value_weight=model.value_loss_weight,
            next_action_weight=model.sequence.next_action_weight,
            teacher=teacher,
            distillation_weight=config.distillation_weight,
        )

    def to(self, device: torch.device) -> "Loss":
        """The same loss for outputs on a device."""
        return replace(
            self,
            objective_weights=self.objective_weights.to(device),
            log_sampling_rates=self.log_sampling_rates.to(device),
            auxiliary_weights=self.auxiliary_weights.to(device),
            is_dwell=self.is_dwell.to(device),
        )

    def sampled_logits(self, logits: Tensor) -> Tensor:
        """Logits (B, O) among the sampled rows, from those among all rows."""
        return logits - self.log_sampling_rates

    def __call__(self, output: GemOutput, batch: Batch, rows: float) -> Tensor:
        """The loss summed over a batch, divided by `rows`."""
        logits = self.sampled_logits(output.logits)
        loss = masked_loss(logits, batch.labels, batch.label_mask * self.objective_weights, rows)
        if len(self.auxiliary_weights):
            loss = loss + self._auxiliary_loss(output.auxiliary, batch) / rows
        if self.teacher:
            loss = loss + self.distillation_weight * self._distillation_loss(logits, batch, rows)
        if output.value_distribution:
            is_positive = batch.label_mask & (batch.labels > 0)
            nll = output.value_distribution.negative_log_likelihood(batch.outcome_values)
            loss = loss + self.value_weight * (nll * is_positive).sum() / rows
        if output.next_action_loss is not None:
            # A repeated batch without labels has been learned already.
            is_new = batch.label_mask.any()
            loss = loss + self.next_action_weight * output.next_action_loss * is_new
        return loss

    def _distillation_loss(self, logits: Tensor, batch: Batch, rows: float) -> Tensor:
        """The loss of logits (B, O) towards those of the teacher; both are of the sampled rows."""
        assert self.teacher
        teacher = self.teacher.lookup(batch.impression_ids)
        target = torch.sigmoid(self.sampled_logits(teacher.logits.to(logits)))
        mask = batch.label_mask & teacher.mask.to(logits.device)
        return masked_loss(logits, target, mask * self.objective_weights, rows)

    def _auxiliary_loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The weighted sum of the losses of auxiliary objectives, whose outputs are (B, A)."""
        labels, weights = batch.extra_labels, batch.extra_mask * self.auxiliary_weights
        cross_entropy = F.binary_cross_entropy_with_logits(outputs, labels, reduction="none")
        huber = F.huber_loss(outputs, labels, reduction="none")
        return (torch.where(self.is_dwell, huber, cross_entropy) * weights).sum()


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


def entropy_scales(
    objectives: Sequence[str], base_rates: Mapping[str, float], power: float
) -> Tensor:
    """The factor (O) on the loss of each objective, 1 for the one with the highest entropy.

    Cross-entropies are at most about the entropy of the base rate: plain sums leave little of the
    shared layers to rare objectives.
    """
    rates = torch.tensor([base_rates.get(name, torch.nan) for name in objectives])
    entropies = -(torch.xlogy(rates, rates) + torch.xlogy(1 - rates, 1 - rates))
    highest = entropies.nan_to_num(0.0).max()
    return (highest / entropies).pow(power).nan_to_num(1.0)


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
    several processes. `item_rows` and, in training, `training_item_rows` map item indexes to rows
    of the item table; `user_rows` is the number of rows of the user table.
    """

    core: Gem
    dense: nn.Module
    tables: EmbeddingTables
    item_rows: ItemRows
    user_rows: int
    training_item_rows: TrainingItemRows | None = None

    def table_ids(self, batch: Batch, selection: HistorySelection) -> dict[str, Tensor]:
        """The ids that a batch looks up, by table; in training, items may be dropped.

        The look-ups of repeated and of padding batches are not counted, since their rows were
        trained on before.
        """
        item_rows = self.item_rows
        if self.training_item_rows and self.core.training and not batch.is_padding:
            item_rows = partial(self.training_item_rows, is_repeated=batch.is_repeated)
        return table_ids(batch, selection.positions, item_rows, self.user_rows)

    def __call__(self, batch: Batch, lookup: StartedLookup | None = None) -> GemOutput:
        """Logits and embeddings of a batch, whose look-up may have been started."""
        selection = self.core.select_history(batch)
        ids = lookup.requested if lookup else self.table_ids(batch, selection)
        vectors = lookup.vectors() if lookup else self.tables(dict(ids))
        unknown = self._unknown_events(ids, len(batch))
        divided = EmbeddingVectors.of_batch(batch, vectors, unknown)
        return cast(GemOutput, self.dense(batch, selection, divided))

    def _unknown_events(self, ids: Mapping[str, Tensor], candidates: int) -> Tensor | None:
        """The events (P) that are looked up as the unknown item: it was dropped, or has no row."""
        if not (self.core.training and self.core.history.next_action_losses):
            return None
        return ids[ITEM_TABLE][candidates:] == UNKNOWN_ITEM_ROW


class NonFiniteLossError(ArithmeticError):
    """The loss of a step is not finite on the processes `ranks`."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(f"the loss is not finite on processes {ranks}")
        self.ranks = ranks


class LossCheck:
    """Checks that the losses of all processes are finite, every `every` steps.

    Reading a loss makes the host wait for a GPU. With `every` above 1 the model may have been
    updated by a loss that is not finite when that is found, so `read` before each checkpoint.
    """

    def __init__(self, every: int = 1) -> None:
        self.every = every
        self._pending: list[Tensor] = []

    def add(self, loss: Tensor) -> None:
        """Record the loss of a step; raises NonFiniteLossError on all processes alike."""
        self._pending.append(loss.detach())
        if len(self._pending) >= self.every:
            self.read()

    def read(self) -> None:
        """Check the losses that were not read yet; a collective call."""
        if self._pending:
            losses = torch.stack(self._pending)
            self._pending.clear()
            if ranks := ranks_where(~torch.isfinite(losses).all()):
                raise NonFiniteLossError(ranks)


def train_step(
    model: GemModel,
    batch: Batch,
    rows: float,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    check: LossCheck | None = None,
    lookup: StartedLookup | None = None,
) -> GemOutput:
    """Update on a batch, whose look-up may have been started; returns the output before the update.

    `rows` is the mean number of rows over all processes, whose gradients are averaged. Embedding
    tables update themselves in the backward pass. Raises NonFiniteLossError on every process if the
    loss of any is not finite, because the others would otherwise wait in collectives: before the
    update, unless `check` reads losses less often.
    """
    output = model(batch, lookup)
    batch_loss = loss(output, batch, rows)
    (check or LossCheck()).add(batch_loss)
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
