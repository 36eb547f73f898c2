"""The student: a small model with one serving head and one distillation head.

B rows, R requests, N events, d row width, W event width, O objectives, H hidden width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from etl.spec.base import Strict
from training.data.batch import Batch
from training.data.features import Features
from training.model.events import EventTokens, item_input
from training.model.lookup import ITEM, Vectors
from training.model.numeric import RunningScale
from training.model.sequence.target import TargetAttention


class StudentConfig(Strict):
    """Sizes of a student."""

    row_width: int = 16
    event_width: int = 32
    heads: int = 2
    hidden: tuple[int, int] = (128, 64)
    max_length: int = 100
    dropout: float = 0.1
    item_dropout: float = 0.2


@dataclass(frozen=True)
class StudentOutput:
    """Logits (B, O) of the served head and of the one that imitates GEM."""

    serving: Tensor
    distilled: Tensor


class GradientScale(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a constant."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, scale: float) -> Tensor:
        """X itself."""
        ctx.scale = scale  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        """The scaled gradient."""
        return grad * ctx.scale, None  # type: ignore[attr-defined]


class Student(nn.Module):
    """All features side by side, the history by target attention, one MLP, two heads.

    The distillation head (ExFM's auxiliary head, 2502.17494 eq. 3-5) sees the backbone through a
    gradient scale, and is never served.
    """

    def __init__(self, features: Features, config: StudentConfig) -> None:
        super().__init__()
        d, w = config.row_width, config.event_width
        tables = 1 + len(features.item.ids)
        given = sum(features.item.vectors.values())
        self.features = features
        self.events = EventTokens(tables, d, given, len(features.surfaces), len(features.events), w)
        self.candidate = nn.Linear(tables * d + given, w)
        self.candidate.weight = self.events.item.weight
        self.target = TargetAttention(w, config.heads)
        numbers = len(features.row_numbers) + len(features.user.numbers)
        self.scale = RunningScale(numbers)
        ids = tables + len(features.context.ids) + len(features.user.ids)
        first, second = config.hidden
        self.backbone = nn.Sequential(
            nn.Linear(ids * d + given + numbers + w, first),
            nn.LayerNorm(first),
            nn.ReLU(),
            nn.Dropout(config.dropout),
            nn.Linear(first, second),
            nn.ReLU(),
        )
        self.serving = nn.Linear(second, len(features.objectives))
        self.distilled = nn.Linear(second, len(features.objectives))
        for head in (self.serving, self.distilled):
            nn.init.constant_(head.bias, -2.0)

    def forward(self, batch: Batch, vectors: Vectors, gradient_scale: float = 1.0) -> StudentOutput:
        """Logits of all rows."""
        f, history = self.features, batch.history
        events = self.events(history, vectors.events, history.positions)
        item = {name: vectors.rows[name] for name in (ITEM, *f.item.ids)}
        known = item_input(item, batch.row_vectors)
        target = self.target(self.candidate(known), events, batch.request, history.offsets)
        numbers = torch.cat((batch.row_numbers, batch.user_numbers[batch.request]), 1)
        x = torch.cat(
            (
                known,
                *(vectors.rows[name] for name in f.context.ids),
                *(vectors.users[name][batch.request] for name in f.user.ids),
                self.scale(numbers),
                target,
            ),
            dim=1,
        )
        h = self.backbone(x)
        return StudentOutput(
            self.serving(h), self.distilled(GradientScale.apply(h, gradient_scale))
        )
