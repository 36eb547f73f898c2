"""Ragged layout: N elements of G groups, one group after another, cut by `offsets` (G+1)."""

import torch
from torch import Tensor


def group_of_each(offsets: Tensor) -> Tensor:
    """The group of each element (N)."""
    groups = torch.arange(len(offsets) - 1, device=offsets.device)
    return torch.repeat_interleave(groups, offsets.diff())


def position_in_group(offsets: Tensor) -> Tensor:
    """The place of each element (N) in its group, from 0."""
    first = torch.repeat_interleave(offsets[:-1], offsets.diff())
    return torch.arange(len(first), device=offsets.device) - first
