"""The ratio of the teacher's gradient on a student's backbone to that of the labels.

B examples, H width of the student's last hidden layer, O objectives, C outputs of linear heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

NORM_EMA_DECAY = 0.99


@dataclass(frozen=True)
class HeadGradients:
    """Gradients of a loss on the outputs (B, C) of linear heads, with the heads' weights (C, H).

    `objectives` has the objective of each output (C).
    """

    outputs: Tensor
    weights: Tensor
    objectives: Tensor

    @classmethod
    def of(
        cls, heads: Sequence[nn.Linear], outputs: Sequence[Tensor], objectives: Sequence[int]
    ) -> "HeadGradients":
        """Those of heads whose outputs retained their gradients."""
        gradients = [each.grad for each in outputs if each.grad is not None]
        weights = torch.cat([head.weight.detach() for head in heads])
        return cls(torch.cat(gradients, 1), weights, torch.tensor(objectives))

    def on_hidden(self, scales: Tensor) -> Tensor:
        """The gradient (B, H) on the hidden layer, with a factor for each objective (O)."""
        return (self.outputs * scales[self.objectives]) @ self.weights

    def norms_by_objective(self, num_objectives: int) -> Tensor:
        """The norm of each objective's gradient (O) on the hidden layer.

        That of an objective is a sum of outer products, one of each of its outputs, whose norm
        follows from the products of their factors.
        """
        products = (self.outputs.T @ self.outputs) * (self.weights @ self.weights.T)
        is_of_objective = nn.functional.one_hot(self.objectives, num_objectives).to(products)
        squared = (is_of_objective.T @ products * is_of_objective.T).sum(1)
        return squared.clamp(min=0).sqrt()


class GradientBalancer:
    """Scales the teacher's gradient on the backbone to a ratio of the labels' gradient.

    Either one factor is used, or one for each objective. Norms are averaged over the batches that
    have them (exponential moving average). Adam makes the heads independent of the scale of their
    loss, so for the backbone only these ratios matter.

    Attributes:
        norms: Averages of the labels' and the teacher's norms (2, 1 or O); 0 for none yet.
    """

    def __init__(self, gradient_ratio: float, num_objectives: int, *, by_objective: bool) -> None:
        self.gradient_ratio, self.by_objective = gradient_ratio, by_objective
        self.num_objectives = num_objectives
        self.norms = torch.zeros(2, num_objectives if by_objective else 1)

    def __call__(self, labels: HeadGradients, teacher: HeadGradients) -> Tensor:
        """The scaled gradient (B, H) of the teacher."""
        measured = torch.stack([self._norms_of(each) for each in (labels, teacher)])
        decay = torch.where(self.norms > 0, NORM_EMA_DECAY, 0.0)
        averaged = decay * self.norms + (1 - decay) * measured
        self.norms = torch.where(measured > 0, averaged, self.norms)
        return teacher.on_hidden(self.scales.expand(self.num_objectives))

    def _norms_of(self, gradients: HeadGradients) -> Tensor:
        if self.by_objective:
            return gradients.norms_by_objective(self.num_objectives)
        total = gradients.on_hidden(torch.ones(self.num_objectives))
        norm: Tensor = torch.linalg.vector_norm(total)
        return norm.view(1)

    @property
    def scales(self) -> Tensor:
        """The factors (1 or O) of the teacher's gradient; 0 where it has none yet."""
        labels, teacher = self.norms
        return torch.where(teacher > 0, self.gradient_ratio * labels / teacher, 0.0)
