"""Causal attention in windows: chunks of all sequences as one batch, forward and backward by hand.

C chunks of w positions, H heads, D their width. Each chunk attends to itself and to the chunk
before. Only the last one of a sequence is filled up, with at most w - 1 rows.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training.ops.attention.kinds import Kind
from training.ops.attention.weights import square, weigh, weigh_backward
from training.ops.ragged import group_of_each, position_in_group

CACHED = 2**17  # scores


@dataclass(frozen=True)
class Chunks:
    """Where positions lie in chunks: `slot` (N) of C * w; `first` are the first of a sequence."""

    slot: Tensor
    first: tuple[int, ...]
    count: int
    window: int

    @property
    def full(self) -> bool:
        """Whether there is nothing to fill up."""
        return len(self.slot) == self.count * self.window

    def parts(self, heads: int) -> list[slice]:
        """The chunks in order, so many together that their scores fit into a core's cache."""
        step = max(1, CACHED // (heads * 2 * self.window**2))
        return [slice(at, min(at + step, self.count)) for at in range(0, self.count, step)]

    def hide_previous(self, scores: Tensor, part: slice, value: float) -> None:
        """The first chunk of a sequence has none before it: scores (c, H, w, 2 w) of a part."""
        for chunk in self.first[bisect_left(self.first, part.start) :]:
            if chunk >= part.stop:
                break
            scores[chunk - part.start, :, :, : self.window] = value

    def fill(self, x: Tensor) -> Tensor:
        """(N, H, D) to (C, H, w, D), zeros where nothing lies."""
        if not self.full:
            rows = self.count * self.window
            x = x.new_zeros(rows, *x.shape[1:]).index_copy_(0, self.slot, x)
        return x.unflatten(0, (self.count, self.window)).transpose(1, 2).contiguous()

    def take(self, x: Tensor) -> Tensor:
        """(C, H, w, D) to (N, H, D)."""
        rows = x.transpose(1, 2).flatten(0, 1)
        return rows if self.full else rows[self.slot]


def chunks_of(offsets: Tensor, window: int) -> Chunks:
    """The chunks of sequences cut by `offsets` (S+1); one without positions has none."""
    chunks = (offsets.diff() + window - 1) // window
    start = F.pad(chunks.cumsum(0), (1, 0))
    slot = start[group_of_each(offsets)] * window + position_in_group(offsets)
    return Chunks(slot, tuple(start[:-1][chunks > 0].tolist()), int(start[-1]), window)


def attention(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, kind: Kind, window: int) -> Tensor:
    """As `training.ops.attention.reference.attention`, for causal kinds."""
    return _Windows.apply(q, k, v, chunks_of(offsets, window), kind)


def _with_previous(x: Tensor) -> Tensor:
    """Each chunk after the one before it: (C, H, w, D) to (C, H, 2 w, D)."""
    return torch.cat((F.pad(x, (0, 0, 0, 0, 0, 0, 1, 0))[:-1], x), 2)


def _back(grad: Tensor) -> Tensor:
    """The gradient of chunks from that of chunks with the one before: `_with_previous`, back."""
    previous, own = grad.chunk(2, 2)
    own = own.contiguous()
    own[:-1] += previous[1:]
    return own


class _Windows(torch.autograd.Function):
    """Some chunks at a time, so that their scores stay in the cache; q, k, v are (N, H, D)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, chunks: Chunks, kind: Kind) -> Tensor:
        q = chunks.fill(q * kind.scale(q.shape[-1]))
        k, v = _with_previous(chunks.fill(k)), _with_previous(chunks.fill(v))
        out, kept = torch.empty_like(q), []
        own = square(chunks.window, q.dtype, q.device)
        for part in chunks.parts(q.shape[1]):
            scores = q[part] @ k[part].transpose(2, 3)
            chunks.hide_previous(scores, part, -torch.inf if kind.activation == "softmax" else 0.0)
            weights, needed = weigh(scores, own, kind)
            kept += [weights, needed]
            torch.matmul(weights, v[part], out=out[part])
        ctx.save_for_backward(q, k, v, *kept)
        ctx.chunks, ctx.kind = chunks, kind
        return chunks.take(out).mul_(kind.outside)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *kept = ctx.saved_tensors
        chunks, kind = ctx.chunks, ctx.kind
        grad = chunks.fill(grad * kind.outside)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        own, parts = square(chunks.window, q.dtype, q.device), chunks.parts(q.shape[1])
        for part, weights, scores in zip(parts, kept[::2], kept[1::2], strict=True):
            torch.matmul(weights.transpose(2, 3), grad[part], out=dv[part])
            dweights = grad[part] @ v[part].transpose(2, 3)
            dscores = weigh_backward(dweights, weights, scores, own, kind)
            chunks.hide_previous(dscores, part, 0.0)
            torch.matmul(dscores, k[part], out=dq[part])
            torch.matmul(dscores.transpose(2, 3), q[part], out=dk[part])
        dq *= kind.scale(q.shape[-1])
        return *(chunks.take(d) for d in (dq, _back(dk), _back(dv))), None, None
