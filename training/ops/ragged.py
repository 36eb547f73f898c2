"""Ragged layout: N elements of G groups, one group after another, cut by `offsets` (G+1)."""

import torch
from torch import Tensor


def group_of_each(offsets: Tensor) -> Tensor:
    """The group of each element (N)."""
    groups = torch.arange(len(offsets) - 1, device=offsets.device)
    return torch.repeat_interleave(groups, offsets.diff())
