"""Many surfaces, many objectives: gates by surface, a head per (surface, objective).

B batch, H hidden width, S surfaces, O objectives.
"""

import torch
from torch import Tensor, nn


class DomainGate(nn.Module):
    """PEPNet's gate (2302.01115): h * 2 sigmoid(MLP([surface ; stop_gradient(h)]))."""

    def __init__(self, surfaces: int, hidden: int, width: int = 16) -> None:
        super().__init__()
        self.surface = nn.Embedding(surfaces + 1, width)
        self.mlp = nn.Sequential(
            nn.Linear(width + hidden, hidden // 2), nn.ReLU(), nn.Linear(hidden // 2, hidden)
        )

    def forward(self, h: Tensor, surface: Tensor) -> Tensor:
        """(B, H) to (B, H)."""
        seen = torch.cat((self.surface(surface), h.detach()), 1)
        return h * 2 * torch.sigmoid(self.mlp(seen))


class Heads(nn.Module):
    """Logits (B, O): a shared head an objective, and what each surface adds to it (from zero)."""

    def __init__(self, surfaces: int, objectives: int, hidden: int) -> None:
        super().__init__()
        self.shared = nn.Linear(hidden, objectives)
        self.own_weight = nn.Parameter(torch.zeros(surfaces + 1, objectives, hidden))
        self.own_bias = nn.Parameter(torch.zeros(surfaces + 1, objectives))
        nn.init.constant_(self.shared.bias, -2.0)

    def forward(self, h: Tensor, surface: Tensor) -> Tensor:
        """h (B, H) and surface codes (B) to logits (B, O)."""
        own = torch.einsum("bh,boh->bo", h, self.own_weight[surface])
        return self.shared(h) + own + self.own_bias[surface]
