"""What a user dealt with lately, against a candidate: by how like it is, and by its attributes.

R requests, L events, C candidates, T event types, M attributes compared, P paces, W width.
"""

import math

import torch
from torch import Tensor, nn

from training.model.events import AGES, DWELLS, age_bucket
from training.model.interest import PRIOR

PACES = (3600.0, 6 * 3600.0, 86400.0, 3 * 86400.0, 12 * 86400.0)  # seconds


def by_type(types: Tensor, count: int) -> Tensor:
    """Types (R, L), from 1, as ones and zeros (R, L, T); a padded event is of none."""
    return (types[..., None] == torch.arange(1, count + 1, device=types.device)).float()


def alike(own: Tensor, seen: Tensor) -> list[Tensor]:
    """Whether candidates (R, C, M) and what was seen (R, L, M) share an attribute: (R, C, L) each.

    Attribute 0 is like nothing.
    """
    pairs = ((own[:, :, None, m], seen[:, None, :, m]) for m in range(own.shape[2]))
    return [(mine == theirs) & (mine != 0) for mine, theirs in pairs]


class Liked(nn.Module):
    """Mean item of each type of a user's events (R, T, W), as in training/model/interest.py."""

    def __init__(self) -> None:
        super().__init__()
        self.dwell = nn.Parameter(torch.zeros(DWELLS))
        self.age = nn.Parameter(torch.zeros(AGES))

    def forward(self, items: Tensor, kinds: Tensor, dwells: Tensor, ages: Tensor) -> Tensor:
        """Items (R, L, W) of events of `kinds` (R, L, T), weighted by dwell and age."""
        weight = torch.exp(self.dwell[dwells] + self.age[age_bucket(ages)])
        weighed = (kinds * weight[..., None]).transpose(1, 2)
        return (weighed @ items) / (weighed.sum(2, keepdim=True) + PRIOR)


class Alike(nn.Module):
    """How many events are like a candidate, by type, each fading with its age at several paces."""

    def __init__(self) -> None:
        super().__init__()
        self.pace = nn.Parameter(torch.tensor([math.log(pace) for pace in PACES]))

    def fading(self, kinds: Tensor, ages: Tensor) -> Tensor:
        """What each event of `kinds` (R, L, T) counts for now (R, L, T * P)."""
        left = torch.exp(-ages[..., None] / self.pace.exp())
        return (kinds[..., None] * left[:, :, None]).flatten(2)

    def forward(self, own: Tensor, seen: Tensor, fading: Tensor) -> Tensor:
        """Attributes of candidates (R, C, M) and of events (R, L, M) to (R, C, M * T * P)."""
        counts = [torch.log1p(same.float() @ fading) for same in alike(own, seen)]
        return torch.cat(counts, 2) if counts else fading[:, :0, :0].expand(*own.shape[:2], 0)
