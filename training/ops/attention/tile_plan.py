"""Which keys each query attends to, and the blocks of queries and keys that GPU kernels work on."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from training.ops.attention.reference import AttentionKind
from training.ops.ragged import position_in_segment, segment_ids


@dataclass(frozen=True)
class BlockSpans:
    """Blocks of rows [first, last) of one side, and the span [begin, end) of the other side.

    `keys_start` is the first key of the block's sequence. A span of keys is relative to it; a span
    of queries is in rows.
    """

    first: Tensor
    last: Tensor
    keys_start: Tensor
    begin: Tensor
    end: Tensor

    @property
    def kernel_args(self) -> tuple[Tensor, ...]:
        """The tensors, in the order in which kernels take them."""
        return self.first, self.last, self.keys_start, self.begin, self.end


@dataclass(frozen=True)
class TilePlan:
    """The keys [low, high) that each query (N) attends to, and the blocks of both sides."""

    low: Tensor
    high: Tensor
    queries: BlockSpans
    keys: BlockSpans

    @classmethod
    def build(
        cls, num_queries: int, num_keys: int, q_offsets: Tensor, kv_offsets: Tensor,
        kind: AttentionKind, window: int | None, limits: Tensor | None, block_size: int,
    ) -> "TilePlan":  # fmt: skip
        """Plan attention on the device, without a wait of the host.

        The number of blocks is the most that so many rows can need; those at the end may be empty.
        See `training.ops.attention.reference.attention` for `window` and `limits`.
        """
        sequence = segment_ids(q_offsets, num_queries)
        position = position_in_segment(q_offsets, num_queries)
        low, high = torch.zeros_like(position), kv_offsets.diff()[sequence]
        if kind.causal:
            high = position + 1
            low = low if window is None else (position - window).clamp(min=0)
        elif limits is not None:
            high = torch.minimum(high, limits)
        return cls(
            low,
            high,
            queries=_query_blocks(q_offsets, kv_offsets, low, high, block_size),
            keys=_key_blocks(num_keys, q_offsets, kv_offsets, kind, window, block_size),
        )


def _query_blocks(
    q_offsets: Tensor, kv_offsets: Tensor, low: Tensor, high: Tensor, block_size: int
) -> BlockSpans:
    """Blocks of queries, each with the span of keys that any of them attends to."""
    blocks = _split_into_blocks(len(low), q_offsets, block_size)
    rows = torch.arange(len(low), device=low.device)
    block_of_row = torch.searchsorted(blocks.first, rows, right=True) - 1
    begin = _segment_min(low, block_of_row, len(blocks.first))
    end = -_segment_min(-high, block_of_row, len(blocks.first))
    return BlockSpans(blocks.first, blocks.last, kv_offsets[blocks.sequence], begin, end)


def _key_blocks(
    num_keys: int,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    kind: AttentionKind,
    window: int | None,
    block_size: int,
) -> BlockSpans:
    """Blocks of keys, each with the rows of queries that may attend to any of them."""
    blocks = _split_into_blocks(num_keys, kv_offsets, block_size)
    keys_start = kv_offsets[blocks.sequence]
    first_query, end = q_offsets[blocks.sequence], q_offsets[blocks.sequence + 1]
    begin = first_query
    if kind.causal:
        begin = first_query + (blocks.first - keys_start)
        if window is not None:
            last_key = blocks.last - keys_start - 1
            end = torch.minimum(end, first_query + last_key + window + 1)
    end = torch.where(blocks.first < blocks.last, end, begin)
    return BlockSpans(blocks.first, blocks.last, keys_start, begin, end)


class _Blocks(NamedTuple):
    """Rows [first, last) of each block, and the sequence it belongs to."""

    first: Tensor
    last: Tensor
    sequence: Tensor


def _split_into_blocks(rows: int, offsets: Tensor, block_size: int) -> _Blocks:
    """Split each sequence into blocks of at most `block_size` rows; empty blocks are last."""
    sequences = len(offsets) - 1
    counts = (offsets.diff() + block_size - 1) // block_size
    ends = counts.cumsum(0)
    number = torch.arange(rows // block_size + sequences, device=offsets.device)
    sequence = torch.searchsorted(ends, number, right=True).clamp(max=sequences - 1)
    first = offsets[sequence] + (number - ends[sequence] + counts[sequence]) * block_size
    first = torch.where(number < ends[-1:], first, offsets[-1:])
    last = torch.minimum(first + block_size, offsets[sequence + 1])
    return _Blocks(first, last, sequence)


def _segment_min(values: Tensor, segment: Tensor, num_segments: int) -> Tensor:
    minima = values.new_full((num_segments,), torch.iinfo(values.dtype).max)
    return minima.scatter_reduce(0, segment, values, "amin")
