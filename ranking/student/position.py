"""The effect of an impression's position on its logits, apart from all other features.

A position is known only after ranking. The logit of an impression at position k is that of the
served position plus b(k) - b(served), where b depends on surface and position alone: an additive
bias tower without features of user or item, so that it cannot learn relevance. A ranker therefore
serves its logits as they are, and only evaluations on logged impressions add the effect.

S surfaces and the unknown one, P positions, O objectives.
"""

import torch
from torch import Tensor, nn

MAX_POSITIONS = 32  # P; later positions share the effect of the last one


class PositionBias(nn.Module):
    """Effects by surface and position: a slope, and a deviation from it at each position."""

    def __init__(self, served_position: int, num_surfaces: int, num_objectives: int) -> None:
        super().__init__()
        self.served_position = min(served_position, MAX_POSITIONS - 1)
        self.slope = nn.Parameter(torch.zeros(1 + num_surfaces, 1, num_objectives))
        self.deviation = nn.Parameter(torch.zeros(1 + num_surfaces, MAX_POSITIONS, num_objectives))

    def effects(self) -> Tensor:
        """What each position adds to logits (S, P, O); zero at the served position."""
        bias = self.slope * torch.arange(MAX_POSITIONS)[:, None] + self.deviation
        return bias - bias[:, self.served_position, None]

    def forward(self, positions: Tensor, surfaces: Tensor) -> Tensor:
        """What positions (B) add to logits (B, O); missing ones (NaN) are the served one."""
        known = positions.nan_to_num(float(self.served_position))
        return self.effects()[surfaces, known.clamp(0, MAX_POSITIONS - 1).long()]
