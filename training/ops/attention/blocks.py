"""Attention on a CPU without padding: rectangles of queries and keys, forward and backward by hand.

H heads, D their width. A rectangle is a block of a sequence's queries and the keys that they see;
of a causal one only the corner on the diagonal is masked. Gradients of keys and values add up in
place, so that the backward pass copies nothing; scores and weights are kept for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from training.ops.attention.kinds import Kind
from training.ops.attention.weights import Corner, square, weigh, weigh_backward
from training.ops.ragged import position_in_group

BLOCK = 128


@dataclass(frozen=True)
class Rectangle:
    """Queries and keys by position; the `corner` tells which of the last keys which queries see."""

    queries: slice
    keys: slice
    corner: Corner | None


def rectangles(
    q: Tensor, q_offsets: Tensor, kv_offsets: Tensor, limits: list[int] | None, block: int = BLOCK
) -> Iterator[Rectangle]:
    """The blocks of queries of all sequences that have keys, with the keys that they see.

    A query sees the first `limits` (Nq) keys of its sequence; all of them where there are none.
    """
    q_cuts, kv_cuts = q_offsets.tolist(), kv_offsets.tolist()
    for sequence in range(len(q_cuts) - 1):
        first, last = q_cuts[sequence : sequence + 2]
        key, key_last = kv_cuts[sequence : sequence + 2]
        for at in range(first, last if key < key_last else first, block):
            queries = slice(at, min(at + block, last))
            if limits is None:
                yield Rectangle(queries, slice(key, key_last), None)
            elif top := max(limits[queries]):
                corner = _corner(q, limits[queries], top)
                yield Rectangle(queries, slice(key, key + top), corner)


def _corner(q: Tensor, limits: list[int], top: int) -> Corner | None:
    low, n = min(limits), len(limits)
    if low == top:
        return None
    if low and limits == list(range(low, low + n)):
        return square(n, q.dtype, q.device)
    keys = torch.arange(low, top, device=q.device)
    return Corner((keys < torch.tensor(limits, device=q.device)[:, None]).to(q.dtype))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    kind: Kind,
    limits: Tensor | None = None,
    block: int = BLOCK,
) -> Tensor:
    """As `training.ops.attention.reference.attention`, without a window."""
    if kind.causal:
        limits = 1 + position_in_group(q_offsets)
    told = None if limits is None else limits.tolist()
    plan = list(rectangles(q, q_offsets, kv_offsets, told, block))
    by_head = (x.transpose(0, 1).contiguous() for x in (q * kind.scale(q.shape[-1]), k, v))
    return _Blocks.apply(*by_head, plan, kind).transpose(0, 1)


class _Blocks(torch.autograd.Function):
    """All rectangles; q, k, v are (H, N, D), and q is scaled."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: list[Rectangle], kind: Kind
    ) -> Tensor:
        out = torch.zeros_like(q)
        kept: list[Tensor | None] = []
        for part in plan:
            scores = q[:, part.queries] @ k[:, part.keys].transpose(1, 2)
            weights, needed = weigh(scores, part.corner, kind)
            kept += [weights, needed]
            out[:, part.queries] = weights @ v[:, part.keys]
        ctx.save_for_backward(q, k, v, *kept)
        ctx.plan, ctx.kind = plan, kind
        return out.mul_(kind.outside)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *kept = ctx.saved_tensors
        grad = (grad * ctx.kind.outside).contiguous()
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for part, weights, scores in zip(ctx.plan, kept[::2], kept[1::2], strict=True):
            out = grad[:, part.queries]
            dv[:, part.keys].baddbmm_(weights.transpose(1, 2), out)
            dweights = out @ v[:, part.keys].transpose(1, 2)
            dscores = weigh_backward(dweights, weights, scores, part.corner, ctx.kind)
            dq[:, part.queries] = dscores @ k[:, part.keys]
            dk[:, part.keys].baddbmm_(dscores.transpose(1, 2), q[:, part.queries])
        return dq, dk, dv, None, None
