"""Which keys each query attends to, and the blocks of queries and keys that GPU kernels work on."""

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

INDEX = torch.int32  # arithmetic in 64 bits takes a GPU several times as long


@dataclass(frozen=True)
class BlockSpans:
    """Blocks of rows [first, last) of one side, and the span [begin, end) of the other side.

    In the part [full_begin, full_end) of a span, all pairs with the block attend, so that tiles in
    it need no mask. `keys_start` is the first key of the block's sequence. A span of keys is
    relative to it; a span of queries is in rows. Blocks at the end may be empty, because their
    number is an upper bound.
    """

    first: Tensor
    last: Tensor
    keys_start: Tensor
    begin: Tensor
    full_begin: Tensor
    full_end: Tensor
    end: Tensor

    def pack(self) -> Tensor:
        """One row for each block, with the fields in this order."""
        return torch.stack([getattr(self, field.name) for field in fields(self)], 1)


@dataclass(frozen=True)
class TilePlan:
    """The keys [low, high) that each query (N) attends to, and the packed blocks of both sides."""

    low: Tensor
    high: Tensor
    queries: Tensor
    keys: Tensor

    @classmethod
    def build(
        cls, rows: tuple[int, int], offsets: tuple[Tensor, Tensor], causal: bool,
        window: int | None, limits: Tensor | None, blocks: tuple[int, int],
    ) -> "TilePlan":  # fmt: skip
        """Plan attention on the device, without waiting for it.

        Args:
            rows: The number of queries and of keys.
            offsets: Offsets (S + 1) that cut all queries into sequences, and those of keys.
            causal: Whether a query attends to the keys up to its own position.
            window: See `training.ops.attention.reference.attention`.
            limits: See there.
            blocks: Rows of a block of queries, and of a block of keys.
        """
        offsets = offsets[0].to(INDEX), offsets[1].to(INDEX)
        q_offsets, kv_offsets = offsets
        row = torch.arange(rows[0], dtype=INDEX, device=q_offsets.device)
        sequence = torch.searchsorted(q_offsets[1:], row, right=True)
        low, high = torch.zeros_like(row), kv_offsets.diff()[sequence]
        if window is not None:
            window = min(window, rows[1])  # larger ones are the same, and may not fit INDEX
        if causal:
            position = row - q_offsets[sequence]
            high = position + 1
            low = low if window is None else (position - window).clamp(min=0)
        elif limits is not None:
            high = torch.minimum(high, limits.clamp(max=rows[1]).to(INDEX))
        query_blocks = _split_into_blocks(q_offsets, rows[0], blocks[0])
        key_blocks = _split_into_blocks(kv_offsets, rows[1], blocks[1])
        return cls(
            low,
            high,
            queries=_query_spans(query_blocks, kv_offsets, low, high).pack(),
            keys=_key_spans(key_blocks, offsets, causal, window, limits is not None).pack(),
        )


class _Blocks(NamedTuple):
    """Rows [first, last) of each block, and the sequence it belongs to."""

    first: Tensor
    last: Tensor
    sequence: Tensor


def _query_spans(blocks: _Blocks, kv_offsets: Tensor, low: Tensor, high: Tensor) -> BlockSpans:
    """The span of keys that any query of a block attends to, and the part that all attend to."""
    row = torch.arange(len(low), dtype=INDEX, device=low.device)
    # Empty blocks follow all others, and begin where the rows end.
    block = torch.searchsorted(blocks.first, row, right=True) - 1
    count = len(blocks.first)
    begin, full_begin = _segment_extremes(low, block, count)
    full_end, end = _segment_extremes(high, block, count)
    return BlockSpans(*blocks[:2], kv_offsets[blocks.sequence], begin, full_begin, full_end, end)


def _key_spans(
    blocks: _Blocks,
    offsets: tuple[Tensor, Tensor],
    causal: bool,
    window: int | None,
    limited: bool,
) -> BlockSpans:
    """The rows of queries that may attend to any key of a block, and those that attend to all.

    Limits differ by query, so that with them no part is known to be full.
    """
    q_offsets, kv_offsets = offsets
    keys_start = kv_offsets[blocks.sequence]
    first_query = q_offsets[blocks.sequence]
    is_empty = blocks.first == blocks.last
    end = torch.where(is_empty, first_query, q_offsets[blocks.sequence + 1])
    begin, full_begin, full_end = first_query, first_query, end
    if causal:
        first_key, last_key = blocks.first - keys_start, blocks.last - keys_start - 1
        begin, full_begin = first_query + first_key, first_query + last_key
        if window is not None:
            full_end = torch.minimum(end, first_query + first_key + window + 1)
            end = torch.minimum(end, first_query + last_key + window + 1)
    elif limited:
        full_end = first_query
    return BlockSpans(blocks.first, blocks.last, keys_start, begin, full_begin, full_end, end)


def _split_into_blocks(offsets: Tensor, rows: int, block_size: int) -> _Blocks:
    """Split each sequence into blocks of at most `block_size` rows.

    The number of blocks is known on the host: that of sequences which each waste almost a block.
    """
    sequences = len(offsets) - 1
    count = (rows + sequences * (block_size - 1)) // block_size if rows else 0
    ends = ((offsets.diff() + block_size - 1) // block_size).cumsum(0, dtype=INDEX)
    block = torch.arange(count, dtype=INDEX, device=offsets.device)
    sequence = torch.searchsorted(ends, block, right=True).clamp(max=max(sequences - 1, 0))
    first_block = torch.cat((ends.new_zeros(1), ends))[sequence]
    stop = offsets[sequence + 1]
    first = torch.minimum(offsets[sequence] + (block - first_block) * block_size, stop)
    return _Blocks(first, torch.minimum(first + block_size, stop), sequence)


def _segment_extremes(values: Tensor, segment: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The least and the greatest value of each segment; 0 for segments without values."""
    zeros = values.new_zeros(count)
    least = zeros.scatter_reduce(0, segment, values, "amin", include_self=False)
    return least, zeros.scatter_reduce(0, segment, values, "amax", include_self=False)
