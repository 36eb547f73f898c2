"""GEM's predictions, and a student's loss on labels and on them (ExFM, 2502.17494, eq. 3-7).

B examples, K stored impressions, H width of the student's last hidden layer, O objectives, E extra
windows, V versions of GEM.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ranking.distillation.gradient_balance import GradientBalancer, HeadGradients
from ranking.student.config import DistillationConfig
from training.data.batch import Batch
from training.teacher.predictions import TeacherLogits, TeacherPredictions
from training.trainer.step import masked_loss

ADAPTER_LR = 0.02
ADAPTER_L2 = 1e-3  # pulls slopes to one and intercepts to zero


class TeacherAdapter(nn.Module):
    """Corrects a stale teacher by fresh labels (ExFM's student adapter, eq. 6 and 7).

    Each version of GEM and each objective has a positive slope and an intercept (V, O). The adapter
    corrects a batch before it learns from it, so that no example is corrected by its own label.
    """

    def __init__(self, num_versions: int, num_objectives: int) -> None:
        super().__init__()
        shape = max(1, num_versions), num_objectives
        self.slope = nn.Parameter(torch.zeros(shape))  # logarithm of the slope
        self.intercept = nn.Parameter(torch.zeros(shape))
        self.optimizer = torch.optim.Adam(self.parameters(), ADAPTER_LR)

    def forward(self, teacher: TeacherLogits) -> Tensor:
        """Corrected logits (B, O)."""
        slope = torch.exp(self.slope)[teacher.version_index]
        return slope * teacher.logits + self.intercept[teacher.version_index]

    def update(
        self, teacher: TeacherLogits, labels: Tensor, label_mask: Tensor, log_sampling_rate: Tensor
    ) -> None:
        """One optimizer step on the labels (B, O) of a batch, with sampled negatives.

        `log_sampling_rate` (O) is that of the loss: corrected logits stay those of all rows.
        """
        weights = label_mask * teacher.mask
        sampled_logits = self(teacher) - log_sampling_rate
        loss = masked_loss(sampled_logits, labels, weights, max(1.0, float(weights.sum())))
        loss = loss + ADAPTER_L2 * (self.slope.square().sum() + self.intercept.square().sum())
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()


def distillation_loss(logits: Tensor, teacher_logits: Tensor, mask: Tensor) -> Tensor:
    """Cross-entropy (B, O) towards the teacher's probabilities, summed where `mask`, divided by B.

    Cross-entropy and not squared error, whose gradient vanishes where the student is certain
    (2605.29755).
    """
    target = torch.sigmoid(teacher_logits)
    loss = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    return (loss * mask).sum() / len(logits)


class WindowHeads(nn.Module):
    """Heads on the hidden layer for labels of extra windows (E), used in training only.

    With window mixing a row has a label of one window per objective; the heads of all windows
    train the layers below (Zipper of Lattice, 2512.09200).
    """

    def __init__(self, hidden_dim: int, objective_index: Sequence[int]) -> None:
        super().__init__()
        self.objective_index = list(objective_index)
        self.linear = _linear_head(hidden_dim, len(objective_index))

    def loss(self, outputs: Tensor, position_effects: Tensor, batch: Batch) -> Tensor:
        """The loss of the outputs (B, E) of `linear` at logged positions (B, O)."""
        logits = outputs + position_effects[:, self.objective_index]
        return masked_loss(logits, batch.extra_labels, batch.extra_mask, len(batch))


@dataclass
class DistillationLoss:
    """The loss of a student: labels, and a teacher if there is one.

    Its parameters, the heads that are not served and the adapter, are used in training only.

    Attributes:
        config: How the student learns from GEM.
        log_sampling_rate: Logarithm of the share of negatives that is trained on (O). Labels and
            teacher predictions of all examples are compared with logits on sampled ones
            (2605.29755, eq. 13).
        teacher: GEM's predictions; None trains on labels only.
        teacher_heads: Heads on the hidden layer that learn GEM's predictions.
        adapter: Corrects GEM's predictions.
        gradient_balancer: Scales the gradient of the teacher's heads.
        window_heads: Heads for labels of extra windows; None without window mixing.
    """

    config: DistillationConfig
    log_sampling_rate: Tensor
    teacher: TeacherPredictions | None
    teacher_heads: nn.ModuleList
    adapter: TeacherAdapter | None
    gradient_balancer: GradientBalancer
    window_heads: WindowHeads | None = None

    @classmethod
    def from_config(
        cls,
        config: DistillationConfig,
        hidden_dim: int,
        log_sampling_rate: Tensor,
        teacher: TeacherPredictions | None,
        window_objectives: Sequence[int] = (),
    ) -> "DistillationLoss":
        """The loss of a configuration, for a hidden layer of some width.

        `window_objectives` has the objective of each extra window that is learned.
        """
        num_objectives = len(log_sampling_rate)
        adapter = None
        if teacher and config.use_adapter:
            adapter = TeacherAdapter(len(teacher.versions), num_objectives)
        num_heads = 0
        if teacher and config.kind == "auxiliary":
            num_heads = 2 if adapter else 1  # GEM's predictions as they are, and corrected ones
        heads = nn.ModuleList(_linear_head(hidden_dim, num_objectives) for _ in range(num_heads))
        by_objective = config.gradient_balance == "objective"
        balancer = GradientBalancer(
            config.gradient_ratio, num_objectives, by_objective=by_objective
        )
        windows = WindowHeads(hidden_dim, window_objectives) if window_objectives else None
        return cls(config, log_sampling_rate, teacher, heads, adapter, balancer, windows)

    @property
    def heads(self) -> dict[str, nn.Module]:
        """The heads that are used in training only, by name."""
        heads: dict[str, nn.Module] = {"teacher_heads": self.teacher_heads}
        return heads | ({"window_heads": self.window_heads} if self.window_heads else {})

    def backward(
        self, hidden: Tensor, head: nn.Linear, batch: Batch, position_effects: Tensor
    ) -> Tensor:
        """Accumulate gradients of a batch's hidden layer (B, H), of all heads, and of all below.

        Returns the loss. `position_effects` (B, O) are added to the logits of all heads; only the
        loss on labels trains them.
        """
        teacher = self.teacher.lookup(batch.impression_ids) if self.teacher else None
        heads, objectives = [head], list(range(head.out_features))
        outputs = [head(hidden.detach())]
        logits = outputs[0] + position_effects
        loss = self._served_head_loss(logits, batch, teacher)
        if self.window_heads is not None:
            heads.append(self.window_heads.linear)
            objectives += self.window_heads.objective_index
            outputs.append(self.window_heads.linear(hidden.detach()))
            loss = loss + self.window_heads.loss(outputs[1], position_effects, batch)
        label_gradients = _gradients_of(loss, heads, outputs, objectives)
        gradient = label_gradients.on_hidden(torch.ones(head.out_features))
        if teacher and self.teacher_heads and teacher.mask.any():
            heads = [cast("nn.Linear", each) for each in self.teacher_heads]
            outputs = [each(hidden.detach()) for each in heads]
            distilled_loss = self._teacher_heads_loss(outputs, position_effects.detach(), teacher)
            objectives = list(range(head.out_features)) * len(heads)
            gradients = _gradients_of(distilled_loss, heads, outputs, objectives)
            gradient = gradient + self.gradient_balancer(label_gradients, gradients)
            loss = loss.detach() + distilled_loss.detach()
        torch.autograd.backward(hidden, gradient)
        if teacher and self.adapter:
            self.adapter.update(teacher, batch.labels, batch.label_mask, self.log_sampling_rate)
        return loss.detach()

    def backward_on_teacher(
        self, hidden: Tensor, head: nn.Linear, batch: Batch, position_effects: Tensor
    ) -> Tensor:
        """Accumulate gradients of GEM's predictions alone, also on the served head.

        Returns the loss. Arguments are those of `backward`; labels are not read.
        """
        assert self.teacher is not None
        teacher, effects = self.teacher.lookup(batch.impression_ids), position_effects.detach()
        target = teacher.logits - self.log_sampling_rate
        sampled_logits = head(hidden) + effects - self.log_sampling_rate
        loss = distillation_loss(sampled_logits, target, teacher.mask)
        if self.teacher_heads:
            distilled = [each(hidden) for each in self.teacher_heads]
            loss = loss + self._teacher_heads_loss(distilled, effects, teacher)
        torch.autograd.backward(loss)
        return loss.detach()

    def _served_head_loss(
        self, logits: Tensor, batch: Batch, teacher: TeacherLogits | None
    ) -> Tensor:
        sampled_logits = logits - self.log_sampling_rate
        loss = masked_loss(sampled_logits, batch.labels, batch.label_mask, len(batch))
        if teacher and self.config.kind == "plain":
            target = self._adapted_logits(teacher) - self.log_sampling_rate
            loss = loss + self.config.weight * distillation_loss(
                sampled_logits, target, teacher.mask
            )
        return loss

    def _teacher_heads_loss(
        self, logits: Sequence[Tensor], position_effects: Tensor, teacher: TeacherLogits
    ) -> Tensor:
        """The loss of the logits (B, O) of the teacher's heads."""
        targets = [teacher.logits]
        if self.adapter:
            targets.append(self._adapted_logits(teacher))
        losses = [
            distillation_loss(
                head_logits + position_effects, target - self.log_sampling_rate, teacher.mask
            )
            for head_logits, target in zip(logits, targets, strict=True)
        ]
        return torch.stack(losses).sum()

    @torch.no_grad()
    def _adapted_logits(self, teacher: TeacherLogits) -> Tensor:
        adapted: Tensor = self.adapter(teacher) if self.adapter else teacher.logits
        return adapted


def _gradients_of(
    loss: Tensor, heads: Sequence[nn.Linear], outputs: Sequence[Tensor], objectives: Sequence[int]
) -> HeadGradients:
    """Accumulate the gradients of a loss on heads; returns those on their outputs."""
    for each in outputs:
        each.retain_grad()
    torch.autograd.backward(loss)
    return HeadGradients.of(heads, outputs, objectives)


def _linear_head(hidden_dim: int, num_objectives: int) -> nn.Linear:
    head = nn.Linear(hidden_dim, num_objectives)
    nn.init.constant_(head.bias, -2.0)
    return head
