"""Causal windowed attention on a CPU, with the chunks of all sequences as one batch.

Each of the C chunks of w positions attends to itself and to the chunk before it. Only the last
chunk of a sequence is padded, with at most w - 1 rows. H heads, D width of a head.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training.ops.attention.cpu_tiled import (
    causal_mask,
    scores_to_weights,
    scores_to_weights_backward,
)
from training.ops.attention.reference import AttentionKind
from training.ops.ragged import position_in_segment, segment_ids

MAX_CACHED_SCORES = 2**17  # pairs whose scores fit into the cache of a core


@dataclass(frozen=True)
class ChunkLayout:
    """Assignment of positions to chunks.

    `slot` (N) is the index of each position among count * window; `sequence_starts` are the first
    chunks of the sequences.
    """

    slot: Tensor
    sequence_starts: tuple[int, ...]
    count: int
    window: int

    @property
    def is_full(self) -> bool:
        """Whether no chunk is padded."""
        return len(self.slot) == self.count * self.window

    def cache_sized_slices(self, heads: int) -> list[slice]:
        """Slices of chunks whose scores fit into a core's cache."""
        step = max(1, MAX_CACHED_SCORES // (heads * 2 * self.window**2))
        starts = range(0, self.count, step)
        return [slice(start, min(start + step, self.count)) for start in starts]

    def mask_previous(self, scores: Tensor, part: slice, value: float) -> None:
        """Fill the scores (c, H, w, 2 w) of a slice for chunks without a previous chunk."""
        for chunk in self.sequence_starts[bisect_left(self.sequence_starts, part.start) :]:
            if chunk >= part.stop:
                break
            scores[chunk - part.start, :, :, : self.window] = value

    def pack(self, x: Tensor) -> Tensor:
        """(N, H, D) to (C, H, w, D), padded with zeros."""
        if not self.is_full:
            rows = self.count * self.window
            x = x.new_zeros(rows, *x.shape[1:]).index_copy_(0, self.slot, x)
        return x.view(self.count, self.window, *x.shape[1:]).transpose(1, 2).contiguous()

    def unpack(self, x: Tensor) -> Tensor:
        """(C, H, w, D) to (N, H, D)."""
        rows = x.transpose(1, 2).flatten(0, 1)
        return rows if self.is_full else rows[self.slot]


def chunk_layout(offsets: Tensor, window: int) -> ChunkLayout:
    """The chunks of sequences cut by `offsets` (S + 1); an empty sequence has none."""
    chunks = (offsets.diff() + window - 1) // window
    start = F.pad(chunks.cumsum(0), (1, 0))
    slot = start[segment_ids(offsets)] * window + position_in_segment(offsets)
    return ChunkLayout(slot, tuple(start[:-1][chunks > 0].tolist()), int(start[-1]), window)


def attention(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, kind: AttentionKind, window: int
) -> Tensor:
    """Causal attention within a window.

    Args and result are those of `training.ops.attention.reference.attention`.
    """
    apply: Callable[..., Tensor] = _WindowedAttention.apply
    return apply(q, k, v, chunk_layout(offsets, window), kind)


def _with_previous(x: Tensor) -> Tensor:
    """Concatenate each chunk to the one before it: (C, H, w, D) to (C, H, 2 w, D)."""
    return torch.cat((F.pad(x, (0, 0, 0, 0, 0, 0, 1, 0))[:-1], x), 2)


def _with_previous_backward(grad: Tensor) -> Tensor:
    """Gradient of `_with_previous`."""
    previous_grad, own_grad = grad.chunk(2, 2)
    own_grad = own_grad.contiguous()
    own_grad[:-1] += previous_grad[1:]
    return own_grad


class _WindowedAttention(torch.autograd.Function):
    """Attention over slices of chunks, so that scores stay in the cache; q, k, v are (N, H, D)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, chunks: ChunkLayout, kind: AttentionKind
    ) -> Tensor:
        q = chunks.pack(q * kind.resolve_score_scale(q.shape[-1]))
        k, v = _with_previous(chunks.pack(k)), _with_previous(chunks.pack(v))
        out = torch.empty_like(q)
        saved: list[Tensor | None] = []
        mask = causal_mask(chunks.window, q.dtype, q.device)
        masked_score = -torch.inf if kind.activation == "softmax" else 0.0
        for part in chunks.cache_sized_slices(q.shape[1]):
            raw_scores = q[part] @ k[part].transpose(2, 3)
            chunks.mask_previous(raw_scores, part, masked_score)
            weights, scores = scores_to_weights(raw_scores, mask, kind)
            saved += [weights, scores]
            torch.matmul(weights, v[part], out=out[part])
        ctx.save_for_backward(q, k, v, *saved)
        ctx.chunks, ctx.kind = chunks, kind
        return chunks.unpack(out).mul_(kind.weight_scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *saved = ctx.saved_tensors
        chunks, kind = ctx.chunks, ctx.kind
        grad = chunks.pack(grad * kind.weight_scale)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        mask = causal_mask(chunks.window, q.dtype, q.device)
        parts = chunks.cache_sized_slices(q.shape[1])
        for part, weights, scores in zip(parts, saved[::2], saved[1::2], strict=True):
            torch.matmul(weights.transpose(2, 3), grad[part], out=dv[part])
            dweights = grad[part] @ v[part].transpose(2, 3)
            dscores = scores_to_weights_backward(dweights, weights, scores, mask, kind)
            chunks.mask_previous(dscores, part, 0.0)
            torch.matmul(dscores, k[part], out=dq[part])
            torch.matmul(dscores.transpose(2, 3), q[part], out=dk[part])
        dq *= kind.resolve_score_scale(q.shape[-1])
        dk, dv = _with_previous_backward(dk), _with_previous_backward(dv)
        return chunks.unpack(dq), chunks.unpack(dk), chunks.unpack(dv), None, None
