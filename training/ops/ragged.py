"""Ragged layout: N elements of G groups, one group after another, cut by `offsets` (G+1)."""

import torch
import torch.nn.functional as F
from torch import Tensor


def group_of_each(offsets: Tensor) -> Tensor:
    """The group of each element (N)."""
    groups = torch.arange(len(offsets) - 1, device=offsets.device)
    return torch.repeat_interleave(groups, offsets.diff())


def position_in_group(offsets: Tensor) -> Tensor:
    """The place of each element (N) in its group, from 0."""
    first = torch.repeat_interleave(offsets[:-1], offsets.diff())
    return torch.arange(len(first), device=offsets.device) - first


def runs(first: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Positions (n) of runs of some lengths (G) from their first ones (G), and offsets (G+1)."""
    offsets = F.pad(lengths.cumsum(0), (1, 0))
    at = torch.arange(int(offsets[-1]), device=first.device)
    return at + torch.repeat_interleave(first - offsets[:-1], lengths), offsets


def newest(offsets: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Positions (n) of the last `most` elements of each group, and their offsets (G+1)."""
    lengths = offsets.diff().clamp(max=most)
    return runs(offsets[1:] - lengths, lengths)
