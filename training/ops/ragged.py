"""Ragged layout: N elements of G segments, one after another, cut by `offsets` (G + 1)."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class RaggedPositions(NamedTuple):
    """`positions` (n) of selected elements, segment by segment, and their `offsets` (G + 1)."""

    positions: Tensor
    offsets: Tensor


def segment_ids(offsets: Tensor, total: int | None = None) -> Tensor:
    """The segment of each element (N).

    `total` is N where it is known from the size of another tensor, which avoids a host sync.
    """
    segments = torch.arange(len(offsets) - 1, device=offsets.device)
    return torch.repeat_interleave(segments, offsets.diff(), output_size=total)


def position_in_segment(offsets: Tensor, total: int | None = None) -> Tensor:
    """The position of each element (N) in its segment, from 0; `total` is as in `segment_ids`."""
    first = torch.repeat_interleave(offsets[:-1], offsets.diff(), output_size=total)
    return torch.arange(len(first), device=offsets.device) - first


def concat_ranges(starts: Tensor, lengths: Tensor) -> RaggedPositions:
    """The ranges [start, start + length) of G starts and lengths, one after another.

    The number of positions depends on values: call this in the process that reads batches.
    """
    offsets = F.pad(lengths.cumsum(0), (1, 0))
    index = torch.arange(int(offsets[-1]), device=starts.device)
    shift = torch.repeat_interleave(starts - offsets[:-1], lengths, output_size=len(index))
    return RaggedPositions(index + shift, offsets)


def last_positions(offsets: Tensor, max_length: int) -> RaggedPositions:
    """Positions of the last `max_length` elements of each segment."""
    lengths = offsets.diff().clamp(max=max_length)
    return concat_ranges(offsets[1:] - lengths, lengths)


class QueryKeyPairs(NamedTuple):
    """Position of the query and of the key of each pair."""

    query: Tensor
    key: Tensor


def query_key_pairs(q_offsets: Tensor, kv_offsets: Tensor) -> QueryKeyPairs:
    """All pairs of a query and a key of the same sequence, ordered by query."""
    queries, keys = q_offsets.diff(), kv_offsets.diff()
    keys_of_query = torch.repeat_interleave(keys, queries)
    first_key = torch.repeat_interleave(kv_offsets[:-1], queries)
    pairs = concat_ranges(first_key, keys_of_query)
    return QueryKeyPairs(query=segment_ids(pairs.offsets), key=pairs.positions)


def segment_offsets(segments: Tensor, num_segments: int) -> Tensor:
    """Offsets (G + 1) of elements that are sorted by their segment (N), without a host sync."""
    numbers = torch.arange(num_segments + 1, device=segments.device)
    return torch.searchsorted(segments, numbers)
