"""The pyramid: each level shortens what is old, and leaves what is new.

N events of R requests, M of them left, W width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from training.ops.ragged import group_of_each, position_in_group


@dataclass(frozen=True)
class Shorter:
    """Which place (M of them) each event (N) goes to, and the `offsets` (R+1) of the places."""

    place: Tensor
    offsets: Tensor

    def mean(self, x: Tensor) -> Tensor:
        """(N, …) to the means (M, …) of what goes to each place."""
        places = int(self.offsets[-1])
        sums = x.new_zeros(places, *x.shape[1:]).index_add(0, self.place, x)
        counts = torch.bincount(self.place, minlength=places).to(x.dtype)
        return sums / counts.view(-1, *[1] * (x.dim() - 1))


def shorten(offsets: Tensor, factor: int, keep: int) -> Shorter:
    """The newest `keep` events stay; of those before them `factor` become one, from the newest on.

    Counted back from the newest, so that a place holds the same events whatever lies before them.
    """
    lengths = offsets.diff()
    group = group_of_each(offsets)
    back = lengths[group] - 1 - position_in_group(offsets)
    step = torch.where(back < keep, back, keep + (back - keep) // factor)
    older = (lengths - keep).clamp(min=0)
    left = lengths - older + (older + factor - 1) // factor
    cuts = F.pad(left.cumsum(0), (1, 0))
    return Shorter(cuts[1:][group] - 1 - step, cuts)
