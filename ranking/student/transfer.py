"""How labels and GEM's scores come together in a student's gradient (ExFM, 2502.17494, eq. 3-7).

B rows, H width of the student's last hidden layer, O objectives.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ranking.student.adapter import Adapter, imitation
from ranking.student.config import TransferConfig
from ranking.student.teacher import Said, Teacher
from training.data.batch import Batch
from training.loop.loss import masked_loss

SLOW = 0.99  # of the averages of gradient norms


class Balance:
    """Scales GEM's gradient on the backbone to `ratio` times that of the labels, on average.

    With Adam heads are free of scale, so of label scale, gradient scale and loss weight only this
    ratio matters to the backbone.
    """

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio
        self.labels = self.told = 0.0

    def __call__(self, labels: Tensor, told: Tensor) -> Tensor:
        """Both gradients (B, H) as one."""
        share = SLOW if self.labels else 0.0
        self.labels = share * self.labels + (1 - share) * float(labels.norm())
        self.told = share * self.told + (1 - share) * float(told.norm())
        return labels + self.scale * told

    @property
    def scale(self) -> float:
        """What GEM's gradient is multiplied by."""
        return self.ratio * self.labels / self.told if self.told else 0.0


@dataclass
class Transfer:
    """What a student learns from besides its head; nothing of it is served."""

    config: TransferConfig
    rarer: Tensor
    teacher: Teacher | None
    heads: nn.ModuleList
    adapter: Adapter | None
    balance: Balance

    @classmethod
    def of(
        cls, config: TransferConfig, hidden: int, rarer: Tensor, teacher: Teacher | None
    ) -> "Transfer":
        """As configured, for a hidden layer of some width.

        `rarer` (O) is ln of the share of negatives that is learned from: what labels and GEM say
        of all rows is compared as it is among those (2605.29755, eq. 13).
        """
        objectives = len(rarer)
        adapter = None
        if teacher and config.adapter:
            adapter = Adapter(len(teacher.versions), objectives)
        count = (1 + bool(adapter)) * (config.kind == "auxiliary" and teacher is not None)
        heads = nn.ModuleList(_head(hidden, objectives) for _ in range(count))
        return cls(config, rarer, teacher, heads, adapter, Balance(config.ratio))

    def backward(self, hidden: Tensor, head: nn.Linear, batch: Batch) -> None:
        """Gradients of a batch's hidden layer (B, H), of the served head, and of all below."""
        said = self.teacher.look_up(batch.impressions) if self.teacher else None
        own = hidden.detach().requires_grad_()
        self._served(head(own), batch, said).backward()
        told = hidden.detach().requires_grad_()
        if said and self.heads:
            self._imitated(told, said).backward()
        assert own.grad is not None
        hidden.backward(own.grad if told.grad is None else self.balance(own.grad, told.grad))
        if said and self.adapter:
            self.adapter.learn(said, batch.labels, batch.known)

    def _served(self, logits: Tensor, batch: Batch, said: Said | None) -> Tensor:
        among = logits - self.rarer
        loss = masked_loss(among, batch.labels, batch.known, len(batch))
        if said and self.config.kind == "plain":
            wanted = self._corrected(said) - self.rarer
            loss = loss + self.config.weight * imitation(among, wanted, said.there)
        return loss

    def _imitated(self, hidden: Tensor, said: Said) -> Tensor:
        targets = [said.logits] + ([self._corrected(said)] if self.adapter else [])
        losses = [
            imitation(head(hidden), target - self.rarer, said.there, self.config.label_scale)
            for head, target in zip(self.heads, targets, strict=True)
        ]
        return torch.stack(losses).sum()

    @torch.no_grad()
    def _corrected(self, said: Said) -> Tensor:
        corrected: Tensor = self.adapter(said) if self.adapter else said.logits
        return corrected


def _head(hidden: int, objectives: int) -> nn.Linear:
    head = nn.Linear(hidden, objectives)
    nn.init.constant_(head.bias, -2.0)
    return head
