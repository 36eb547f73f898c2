"""Rotary embeddings of place and time (RoPE, 2104.09864; time as in Kunlun's ROTE, 2602.10016).

N positions, H heads, D width of a head. Kunlun's exact formula is unpublished: here half of the
pairs of a head turn by place, half by the logarithm of age.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from training.ops.ragged import position_in_group

MINUTE = 60.0


@dataclass(frozen=True)
class Turn:
    """Angles of each position, as `cos` and `sin` (N, 1, D / 2)."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """(N, H, D) to (N, H, D): pair i is (x_i, x_{i + D/2})."""
        a, b = x.chunk(2, -1)
        return torch.cat((a * self.cos - b * self.sin, a * self.sin + b * self.cos), -1)


class RotaryTime(nn.Module):
    """Products of a turned query and key depend on how far apart they are, in place and in time.

    Time is ln(1 + age / minute): a ratio of ages is an angle, so that both minutes and weeks count.
    """

    by_place: Tensor
    by_time: Tensor

    def __init__(self, head: int, places: int = 2048) -> None:
        super().__init__()
        pairs = head // 2
        time = pairs // 2
        self.register_buffer("by_place", _frequencies(pairs - time, places), persistent=False)
        self.register_buffer("by_time", _frequencies(time, 16) * math.pi, persistent=False)

    def forward(self, offsets: Tensor, ages: Tensor) -> Turn:
        """Angles of events whose `ages` (N) are in seconds."""
        place = position_in_group(offsets).float()
        time = torch.log1p(ages / MINUTE)
        angle = torch.cat((place[:, None] * self.by_place, time[:, None] * self.by_time), 1)
        return Turn(angle.cos()[:, None], angle.sin()[:, None])


def _frequencies(count: int, longest: float) -> Tensor:
    """From 1 down to 1 / longest, in equal ratios."""
    return longest ** -(torch.arange(count) / max(1, count - 1))
