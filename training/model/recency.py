"""How long ago a user last did each thing with an item like the candidate.

B candidates, N events, G groups of candidates alike, T event types, d row width.
"""

import torch
from torch import Tensor, nn

from training.model.events import AGES, age_bucket
from training.model.matching import Matches
from training.ops.ragged import group_of_each

NEVER = 2**40  # seconds


class Recency(nn.Module):
    """A row for each event type: an embedding of the age of the last matching event, or of none.

    Attention must learn to pick the last event out of many before it can learn from its age; here
    the age itself is the input, and the history decides how far back it can reach.
    """

    def __init__(self, types: int, width: int) -> None:
        super().__init__()
        self.types = types + 1
        self.age = nn.Embedding(self.types * (AGES + 1), width)
        nn.init.normal_(self.age.weight, std=0.05)

    def forward(self, matches: Matches, types: Tensor, ages: Tensor) -> Tensor:
        """Types and ages in seconds of the events (N) to rows of the candidates (B, T, d)."""
        last = self.last(matches, types, ages)
        bucket = torch.where(last < NEVER, age_bucket(last), AGES)
        slot = torch.arange(self.types, device=last.device) * (AGES + 1)
        return self.age(bucket + slot)[matches.group_of, 1:]

    def last(self, matches: Matches, types: Tensor, ages: Tensor) -> Tensor:
        """Smallest age of the matching events of each group and type (G, T + 1); NEVER if none."""
        groups = len(matches.kv_offsets) - 1
        cell = group_of_each(matches.kv_offsets) * self.types + types[matches.events]
        flat = torch.full((groups * self.types,), NEVER, dtype=ages.dtype, device=ages.device)
        return flat.scatter_reduce(0, cell, ages[matches.events], "amin").view(groups, self.types)
