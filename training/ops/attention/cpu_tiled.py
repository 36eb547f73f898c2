"""Ragged attention on a CPU in tiles, without padding; with a manual backward pass.

A tile is a block of a sequence's queries and the keys that they attend to. In a causal tile only
the triangle at its end is masked. Gradients of keys and values accumulate in place, so the backward
pass copies nothing; scores and weights are saved for it. H heads, D width of a head; scores and
weights are (…, queries, keys).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from training.ops.attention.reference import ELEMENTWISE_ACTIVATIONS, AttentionKind
from training.ops.ragged import position_in_segment

aten = torch.ops.aten
ACTIVATION_BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": aten.silu_backward,
    "gelu": aten.gelu_backward,
    "relu": lambda grad, scores: aten.threshold_backward(grad, scores, 0),
    "identity": lambda grad, _scores: grad.clone(),
}


@dataclass(frozen=True)
class TailMask:
    """Mask of the last c keys, `visible` (n, c) of 1 and 0; all other keys are visible."""

    visible: Tensor

    def tail(self, x: Tensor) -> Tensor:
        """The last c columns of scores or weights."""
        return x[..., x.shape[-1] - self.visible.shape[1] :]

    @cached_property
    def additive_mask(self) -> Tensor:
        """The mask to add to scores before a softmax: 0 and minus infinity."""
        return self.visible.log()

    @cached_property
    def has_fully_masked_queries(self) -> bool:
        """Whether a query attends to none of the last c keys."""
        return not bool(self.visible.any(1).all())


@lru_cache(maxsize=64)
def causal_mask(n: int, dtype: torch.dtype, device: torch.device) -> TailMask:
    """Lower triangular mask: each query attends to itself and earlier positions."""
    return TailMask(torch.ones(n, n, dtype=dtype, device=device).tril_())


class Weights(NamedTuple):
    """Attention weights, and the masked scores if the backward pass needs them."""

    weights: Tensor
    scores: Tensor | None


def scores_to_weights(scores: Tensor, tail_mask: TailMask | None, kind: AttentionKind) -> Weights:
    """Mask scores in place and apply the activation."""
    if kind.activation == "softmax":
        if tail_mask:
            tail_mask.tail(scores).add_(tail_mask.additive_mask)
        weights = scores.softmax(-1)
        if tail_mask and tail_mask.has_fully_masked_queries:
            weights.nan_to_num_(0.0)
        return Weights(weights, None)
    if tail_mask:
        tail_mask.tail(scores).mul_(tail_mask.visible)
    return Weights(ELEMENTWISE_ACTIVATIONS[kind.activation](scores), scores)


def scores_to_weights_backward(
    grad: Tensor,
    weights: Tensor,
    scores: Tensor | None,
    tail_mask: TailMask | None,
    kind: AttentionKind,
) -> Tensor:
    """Gradient of the scores from that of the weights; 0 for masked keys."""
    if scores is None:
        softmax_grad: Tensor = aten._softmax_backward_data(grad, weights, -1, weights.dtype)
        return softmax_grad
    scores_grad = ACTIVATION_BACKWARD[kind.activation](grad, scores)
    if tail_mask:
        tail_mask.tail(scores_grad).mul_(tail_mask.visible)
    return scores_grad


BLOCK_SIZE = 128  # queries


@dataclass(frozen=True)
class Tile:
    """A block of queries and their keys, as row ranges, with the mask of the last keys."""

    queries: slice
    keys: slice
    tail_mask: TailMask | None


def iter_tiles(
    q: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    limits: list[int] | None,
    block_size: int = BLOCK_SIZE,
) -> Iterator[Tile]:
    """The tiles of all sequences that have keys.

    A query attends to the first `limits` (Nq) keys of its sequence, or to all without limits.
    """
    sequences = zip(pairwise(q_offsets.tolist()), pairwise(kv_offsets.tolist()), strict=True)
    for (first_query, last_query), (first_key, last_key) in sequences:
        if first_key == last_key:
            continue
        for start in range(first_query, last_query, block_size):
            queries = slice(start, min(start + block_size, last_query))
            if limits is None:
                yield Tile(queries, slice(first_key, last_key), None)
                continue
            max_limit = max(limits[queries])
            if max_limit:
                mask = _tail_mask(q, limits[queries], max_limit)
                yield Tile(queries, slice(first_key, first_key + max_limit), mask)


def _tail_mask(q: Tensor, limits: list[int], max_limit: int) -> TailMask | None:
    """Mask of the keys that only some of the queries with these limits attend to."""
    min_limit, n = min(limits), len(limits)
    if min_limit == max_limit:
        return None
    if min_limit and limits == list(range(min_limit, min_limit + n)):
        return causal_mask(n, q.dtype, q.device)
    keys = torch.arange(min_limit, max_limit, device=q.device)
    return TailMask((keys < torch.tensor(limits, device=q.device)[:, None]).to(q.dtype))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    kind: AttentionKind,
    limits: Tensor | None = None,
    block_size: int = BLOCK_SIZE,
) -> Tensor:
    """Attention in tiles of `block_size` queries.

    Args and result are those of `training.ops.attention.reference.attention`, without windows.
    """
    apply: Callable[..., Tensor] = TiledAttention.apply
    return apply(q, k, v, tile_list(q, q_offsets, kv_offsets, kind, limits, block_size), kind)


def tile_list(
    q: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    kind: AttentionKind,
    limits: Tensor | None,
    block_size: int = BLOCK_SIZE,
) -> list[Tile]:
    """The tiles of `attention`, whose arguments these are."""
    if kind.causal:
        limits = 1 + position_in_segment(q_offsets, len(q))
    limit_list = None if limits is None else limits.tolist()
    return list(iter_tiles(q, q_offsets, kv_offsets, limit_list, block_size))


class TiledAttention(torch.autograd.Function):
    """Attention over a list of tiles; q, k and v are (N, H, D)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: list[Tile], kind: AttentionKind
    ) -> Tensor:
        """Attended values (Nq, H, D)."""
        scaled_q = q * kind.resolve_score_scale(q.shape[-1])
        q, k, v = (x.transpose(0, 1).contiguous() for x in (scaled_q, k, v))
        out = torch.zeros_like(q)
        saved: list[Tensor | None] = []
        for tile in tiles:
            raw_scores = q[:, tile.queries] @ k[:, tile.keys].transpose(1, 2)
            weights, scores = scores_to_weights(raw_scores, tile.tail_mask, kind)
            saved += [weights, scores]
            out[:, tile.queries] = weights @ v[:, tile.keys]
        ctx.save_for_backward(q, k, v, *saved)
        ctx.tiles, ctx.kind = tiles, kind
        return out.mul_(kind.weight_scale).transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k and v."""
        q, k, v, *saved = ctx.saved_tensors
        grad = (grad * ctx.kind.weight_scale).transpose(0, 1).contiguous()
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for tile, weights, scores in zip(ctx.tiles, saved[::2], saved[1::2], strict=True):
            dout = grad[:, tile.queries]
            dv[:, tile.keys].baddbmm_(weights.transpose(1, 2), dout)
            dweights = dout @ v[:, tile.keys].transpose(1, 2)
            dscores = scores_to_weights_backward(
                dweights, weights, scores, tile.tail_mask, ctx.kind
            )
            dq[:, tile.queries] = dscores @ k[:, tile.keys]
            dk[:, tile.keys].baddbmm_(dscores.transpose(1, 2), q[:, tile.queries])
        dq.mul_(ctx.kind.resolve_score_scale(q.shape[-1]))
        return *(x.transpose(0, 1) for x in (dq, dk, dv)), None, None
