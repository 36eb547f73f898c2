"""Causal attention within a sliding window on a CPU, with the tiles of all sequences as one batch.

Each sequence is padded to a multiple of b positions. A tile is a block of b queries and the span of
b (p + 1) keys that ends with it, where b p >= w, so that the span covers the window of each query.
Only the two edges of a tile are masked: the first b + s keys, where windows begin, and the last
b, where they end; s = b p - w. Spans are overlapping views of the keys, which are not copied. T
tiles of all heads and sequences, H heads, D width of a head.
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from training.ops.attention.cpu_tiled import scores_to_weights, scores_to_weights_backward
from training.ops.attention.reference import AttentionKind

MAX_CACHED_SCORES = 2**17  # pairs whose scores fit into the cache of a core
BLOCK_SIZE = 16  # queries, about: small tiles waste fewer pairs outside of the window
MAX_REACH = 8  # blocks before that of the queries; more make products of blocks too small


class EdgeMasks(NamedTuple):
    """1 for visible pairs and 0 for others, at the `begin` (b, b + s) and `end` (b, b) of tiles.

    For a softmax 0 for visible pairs, and minus infinity for others.
    """

    begin: Tensor
    end: Tensor


@lru_cache(maxsize=64)
def edge_masks(
    block: int, excess: int, is_softmax: bool, dtype: torch.dtype, device: torch.device
) -> EdgeMasks:
    """Masks of tiles with blocks of b keys, whose spans exceed the window by `excess` (s) keys."""
    query = torch.arange(block, device=device)[:, None]
    key = torch.arange(block + excess, device=device)
    masks = (key >= query + excess).to(dtype), (key[:block] <= query).to(dtype)
    return EdgeMasks(*(mask.log() for mask in masks)) if is_softmax else EdgeMasks(*masks)


@dataclass(frozen=True)
class TileLayout:
    """Assignment of positions to blocks, and of blocks to tiles; there is a tile for each block.

    `slot` (N H) is the index of each position and head among the padded positions of all heads,
    `blocks` blocks of `block` positions for each. A tile reads its own block and `reach` (p) blocks
    before it. `starts[k]` are the k-th tiles of all sequences and heads, in order: p - k of their
    blocks belong to another sequence.
    """

    slot: Tensor
    heads: int
    blocks: int
    block: int
    reach: int
    window: int
    starts: tuple[tuple[int, ...], ...]

    @property
    def slices(self) -> list[slice]:
        """Slices of tiles whose scores fit into a core's cache."""
        tiles = self.heads * self.blocks
        step = max(1, MAX_CACHED_SCORES // (self.block**2 * (self.reach + 1)))
        return [slice(start, min(start + step, tiles)) for start in range(0, tiles, step)]

    def mask(self, scores: Tensor, part: slice, kind: AttentionKind) -> Tensor:
        """Mask in place the scores (t, b, b (p + 1)), or their gradients, of a slice of tiles."""
        excess, is_softmax = self.block * self.reach - self.window, kind.activation == "softmax"
        begin, end = edge_masks(self.block, excess, is_softmax, scores.dtype, scores.device)
        first, last = scores[..., : begin.shape[1]], scores[..., -self.block :]
        if is_softmax:
            first.add_(begin)
            last.add_(end)
        else:
            first.mul_(begin)
            last.mul_(end)
        for k, tiles in enumerate(self.starts):
            if in_part := tiles[bisect_left(tiles, part.start) : bisect_left(tiles, part.stop)]:
                index = torch.tensor(in_part, device=scores.device) - part.start
                foreign = scores[..., : (self.reach - k) * self.block]
                foreign.index_fill_(0, index, kind.masked_score)
        return scores

    def pack(self, x: Tensor, blocks_before: int = 0) -> Tensor:
        """(N, H, D) to (blocks before + T, b, D): head by head, padded with zeros."""
        rows = (blocks_before + self.heads * self.blocks) * self.block
        packed = x.new_zeros(rows, x.shape[2])
        packed[blocks_before * self.block :].index_copy_(0, self.slot, x.flatten(0, 1))
        return packed.view(-1, self.block, x.shape[2])

    def unpack(self, x: Tensor) -> Tensor:
        """(T, b, D) to (N, H, D)."""
        rows = x.flatten(0, 1).index_select(0, self.slot)
        return rows.view(-1, self.heads, x.shape[2])

    def spans(self, packed: Tensor) -> Tensor:
        """The span of each tile, as a view (T, b (p + 1), D) of (p + T, b, D)."""
        _, block, width = packed.shape
        tiles, length = len(packed) - self.reach, block * (self.reach + 1)
        return packed.as_strided((tiles, length, width), (block * width, width, 1))

    def add_to_spans(self, grad: Tensor, part: slice, weights: Tensor, queries: Tensor) -> None:
        """Add the products of weights (t, b, b (p + 1)) and queries (t, b, D) to a gradient.

        They belong to the spans of a slice of tiles, which overlap in `grad` (p + T, b, D): one
        product for each block of a span.
        """
        tiles, block, width = queries.shape
        strides = (block * width, block * width, width, 1)
        first = grad.storage_offset() + part.start * block * width
        targets = grad.as_strided((self.reach + 1, tiles, block, width), strides, first)
        columns = weights.unflatten(2, (self.reach + 1, block)).permute(2, 0, 3, 1)
        for target, of_block in zip(targets.unbind(), columns.unbind(), strict=True):
            target.baddbmm_(of_block, queries)


def tile_layout(offsets: Tensor, window: int, heads: int) -> TileLayout:
    """The tiles of sequences cut by `offsets` (S + 1); an empty sequence has none."""
    cuts = offsets.numpy()
    reach = min(MAX_REACH, max(2, window // BLOCK_SIZE))
    block = -(-window // reach)
    lengths = np.diff(cuts)
    blocks = -(-lengths // block)
    ends = blocks.cumsum()
    first, total = ends - blocks, int(ends[-1]) if len(ends) else 0
    head_start = total * np.arange(heads)
    position = np.arange(cuts[-1]) + np.repeat(first * block - cuts[:-1], lengths)
    slot = (position[:, None] + head_start * block).ravel()
    starts = tuple(
        tuple((head_start[:, None] + first[blocks > k] + k).ravel().tolist()) for k in range(reach)
    )
    return TileLayout(torch.from_numpy(slot), heads, total, block, reach, window, starts)


class WindowedAttention(torch.autograd.Function):
    """Attention over slices of tiles, so that scores stay in the cache; q, k, v are (N, H, D)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: TileLayout, kind: AttentionKind
    ) -> Tensor:
        """Attended values (Nq, H, D)."""
        q = layout.pack(q * kind.resolve_score_scale(q.shape[-1]))
        k, v = layout.pack(k, layout.reach), layout.pack(v, layout.reach)
        key_spans, value_spans = layout.spans(k), layout.spans(v)
        out = torch.empty_like(q)
        saved: list[Tensor | None] = []
        for part in layout.slices:
            raw_scores = layout.mask(q[part] @ key_spans[part].transpose(1, 2), part, kind)
            weights, scores = scores_to_weights(raw_scores, None, kind)
            saved += [weights, scores]
            torch.bmm(weights, value_spans[part], out=out[part])
        ctx.save_for_backward(q, k, v, *saved)
        ctx.layout, ctx.kind = layout, kind
        return layout.unpack(out).mul_(kind.weight_scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k and v."""
        q, k, v, *saved = ctx.saved_tensors
        layout, kind = ctx.layout, ctx.kind
        grad = layout.pack(grad * kind.weight_scale)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        key_spans, value_spans = layout.spans(k), layout.spans(v)
        for part, weights, scores in zip(layout.slices, saved[::2], saved[1::2], strict=True):
            dweights = grad[part] @ value_spans[part].transpose(1, 2)
            dscores = scores_to_weights_backward(dweights, weights, scores, None, kind)
            if scores is not None:
                layout.mask(dscores, part, kind)
            torch.bmm(dscores, key_spans[part], out=dq[part])
            layout.add_to_spans(dk, part, dscores, q[part])
            layout.add_to_spans(dv, part, weights, grad[part])
        dq *= kind.resolve_score_scale(q.shape[-1])
        dk, dv = dk[layout.reach :], dv[layout.reach :]
        return layout.unpack(dq), layout.unpack(dk), layout.unpack(dv), None, None
