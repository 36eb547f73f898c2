"""Ragged layout: N elements of G segments, one after another, cut by `offsets` (G + 1)."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class RaggedPositions(NamedTuple):
    """`positions` (n) of selected elements, segment by segment, and their `offsets` (G + 1)."""

    positions: Tensor
    offsets: Tensor


def segment_ids(offsets: Tensor) -> Tensor:
    """The segment of each element (N)."""
    segments = torch.arange(len(offsets) - 1, device=offsets.device)
    return torch.repeat_interleave(segments, offsets.diff())


def position_in_segment(offsets: Tensor) -> Tensor:
    """The position of each element (N) in its segment, from 0."""
    first = torch.repeat_interleave(offsets[:-1], offsets.diff())
    return torch.arange(len(first), device=offsets.device) - first


def concat_ranges(starts: Tensor, lengths: Tensor) -> RaggedPositions:
    """The ranges [start, start + length) of G starts and lengths, one after another."""
    offsets = F.pad(lengths.cumsum(0), (1, 0))
    index = torch.arange(int(offsets[-1]), device=starts.device)
    shift = torch.repeat_interleave(starts - offsets[:-1], lengths)
    return RaggedPositions(index + shift, offsets)


def last_positions(offsets: Tensor, max_length: int) -> RaggedPositions:
    """Positions of the last `max_length` elements of each segment."""
    lengths = offsets.diff().clamp(max=max_length)
    return concat_ranges(offsets[1:] - lengths, lengths)
