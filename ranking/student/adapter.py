"""A stale teacher corrected by fresh labels (ExFM's student adapter, 2502.17494, eq. 6 and 7).

B rows, O objectives, V versions of GEM.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ranking.student.teacher import Said
from training.loop.loss import masked_loss

RATE = 0.02
TIGHT = 1e-3  # weight of the distance from no correction


class Adapter(nn.Module):
    """A slope, above zero, and an intercept for each version of GEM and each objective.

    It is asked before it learns from a batch, so no row is corrected by its own label.
    """

    def __init__(self, versions: int, objectives: int) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.zeros(max(1, versions), objectives))
        self.intercept = nn.Parameter(torch.zeros(max(1, versions), objectives))
        self.optimizer = torch.optim.Adam(self.parameters(), RATE)

    def forward(self, said: Said) -> Tensor:
        """Corrected logits (B, O)."""
        slope = torch.exp(self.slope)[said.version]
        return slope * said.logits + self.intercept[said.version]

    def learn(self, said: Said, labels: Tensor, known: Tensor) -> None:
        """One step on the labels (B, O) of a batch."""
        weights = known * said.there
        loss = masked_loss(self(said), labels, weights, max(1.0, float(weights.sum())))
        loss = loss + TIGHT * (self.slope.square().sum() + self.intercept.square().sum())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def imitation(logits: Tensor, wanted: Tensor, there: Tensor, scale: float = 1.0) -> Tensor:
    """Cross-entropy (B, O) summed over what GEM spoke of, over all rows.

    Of logits towards the probabilities of the logits `wanted`, times `scale` and at most one.
    Cross-entropy, not squares: their gradient vanishes where a student is sure (2605.29755).
    """
    target = (torch.sigmoid(wanted) * scale).clamp(0, 1)
    each = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    return (each * there).sum() / len(logits)
