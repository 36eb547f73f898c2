"""Ragged attention on a CPU for few queries per sequence: padded, many sequences in one product.

Sequences with similar numbers of keys form a group, in which queries and keys are padded to the
longest sequence. Scores of few queries are small, and the products of a whole group take a fraction
of the time of products for each sequence. S sequences of a group, Q and K its padded numbers of
queries and keys, H heads, D width of a head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from etl.array_types import Int64
from training.ops.attention.cpu_tiled import ACTIVATION_BACKWARD, aten
from training.ops.attention.reference import ELEMENTWISE_ACTIVATIONS, AttentionKind

MAX_GROWTH = 2.5  # of the number of keys within a group
SMALL_KEYS = 32  # sequences with at most so many keys are one group
TILE_OVERHEAD = 6000  # pairs that are computed in the time that the calls for one tile take
MAX_PAIRS = 2**14  # per sequence; for more, tiles are as fast, and their scores stay in the cache


@dataclass(frozen=True)
class PaddedSide:
    """The queries or the keys of a group, padded to a common length L.

    `rows` (S * L) are the positions that are read; padding repeats the last position of a sequence.
    `slots` (n) are the places among them that are not padding, `positions` (n) what is there.
    """

    rows: Tensor
    slots: Tensor
    positions: Tensor
    lengths: Int64

    @classmethod
    def build(cls, offsets: Int64, sequences: Int64) -> "PaddedSide":
        """The padding of some sequences, each with at least one position."""
        first, lengths = offsets[sequences, None], np.diff(offsets)[sequences]
        column = np.arange(lengths.max())
        rows = (first + np.minimum(column, lengths[:, None] - 1)).ravel()
        slots = np.flatnonzero(column < lengths[:, None])
        return cls(
            rows=torch.from_numpy(rows),
            slots=torch.from_numpy(slots),
            positions=torch.from_numpy(rows[slots]),
            lengths=lengths,
        )

    def pad(self, x: Tensor) -> Tensor:
        """Positions (N, H, D) to (S, H, L, D)."""
        return self._by_head(x.index_select(0, self.rows))

    def pad_gradient(self, grad: Tensor) -> Tensor:
        """Gradients of positions (N, H, D) to (S, H, L, D), zeros where padded."""
        padded = grad.new_zeros(len(self.rows), *grad.shape[1:])
        padded.index_copy_(0, self.slots, grad.index_select(0, self.positions))
        return self._by_head(padded)

    def unpad_into(self, out: Tensor, padded: Tensor) -> None:
        """Write values (S, H, L, D) to their positions of (N, H, D)."""
        rows = padded.transpose(1, 2).reshape(-1, *out.shape[1:])
        out.index_copy_(0, self.positions, rows.index_select(0, self.slots))

    def _by_head(self, rows: Tensor) -> Tensor:
        return rows.view(len(self.lengths), -1, *rows.shape[1:]).transpose(1, 2)


@dataclass(frozen=True)
class SequenceGroup:
    """Sequences that are computed together.

    `masked` (S, 1, Q or 1, K) marks the keys that a query does not attend to; None if there are
    none.
    """

    queries: PaddedSide
    keys: PaddedSide
    masked: Tensor | None

    @classmethod
    def build(
        cls, q_offsets: Int64, kv_offsets: Int64, sequences: Int64, limits: Tensor | None
    ) -> "SequenceGroup":
        """The group of some sequences, each with queries and keys."""
        queries = PaddedSide.build(q_offsets, sequences)
        keys = PaddedSide.build(kv_offsets, sequences)
        longest = int(keys.lengths.max())
        if limits is None and keys.lengths.min() == longest:
            return cls(queries, keys, None)
        visible_keys = torch.from_numpy(keys.lengths)[:, None]
        if limits is not None:
            limits_of_rows = limits[queries.rows].view(len(sequences), -1)
            visible_keys = torch.minimum(visible_keys, limits_of_rows)
        return cls(queries, keys, torch.arange(longest) >= visible_keys[:, None, :, None])


def group_sequences(queries: Int64, keys: Int64) -> list[Int64]:
    """The sequences (S) with `queries` and `keys` (S), in groups of similar numbers of keys."""
    present = np.flatnonzero((queries > 0) & (keys > 0))
    order = present[np.argsort(keys[present], kind="stable")]
    groups, sorted_keys = [], keys[order]
    while len(order):
        longest = max(sorted_keys[0] * MAX_GROWTH, SMALL_KEYS)
        count = int(np.searchsorted(sorted_keys, longest, side="right"))
        groups.append(np.sort(order[:count]))
        order, sorted_keys = order[count:], sorted_keys[count:]
    return groups


def is_efficient(queries: Int64, keys: Int64, groups: Sequence[Int64]) -> bool:
    """Whether groups of sequences with `queries` and `keys` (S) are faster than tiles."""
    pairs, sequences = int(queries @ keys), sum(len(group) for group in groups)
    padded = sum(len(group) * int(queries[group].max() * keys[group].max()) for group in groups)
    return pairs <= MAX_PAIRS * sequences and padded - pairs <= TILE_OVERHEAD * sequences


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Int64,
    kv_offsets: Int64,
    groups: Sequence[Int64],
    kind: AttentionKind,
    limits: Tensor | None = None,
) -> Tensor:
    """Attention of kinds that are not causal, group by group.

    `groups` are the numbers of the sequences that are computed together. The other arguments and
    the result are those of `training.ops.attention.reference.attention`. Keys and values may be the
    same tensor, which is then read once.
    """
    built = build_groups(q_offsets, kv_offsets, groups, limits)
    apply: Callable[..., Tensor] = PaddedAttention.apply
    return apply(q, k, v, built, kind)


def build_groups(
    q_offsets: Int64, kv_offsets: Int64, groups: Sequence[Int64], limits: Tensor | None
) -> list[SequenceGroup]:
    """The groups of `attention`, whose arguments these are."""
    return [SequenceGroup.build(q_offsets, kv_offsets, group, limits) for group in groups]


class PaddedAttention(torch.autograd.Function):
    """Attention over groups of sequences; q, k and v are (N, H, D).

    If v is k, its gradient is that of both.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        groups: list[SequenceGroup],
        kind: AttentionKind,
    ) -> Tensor:
        """Attended values (Nq, H, D)."""
        out = torch.zeros_like(q)
        saved: list[Tensor | None] = []
        scale = kind.resolve_score_scale(q.shape[-1])
        for group in groups:
            queries, keys = group.queries.pad(q) * scale, group.keys.pad(k)
            values = keys if v is k else group.keys.pad(v)
            weights, scores = _weights(queries @ keys.transpose(2, 3), group.masked, kind)
            group.queries.unpad_into(out, weights @ values)
            saved += [queries, keys, None if v is k else values, weights, scores]
        ctx.save_for_backward(*saved)
        ctx.groups, ctx.kind = groups, kind
        ctx.rows, ctx.values_are_keys = (len(q), len(k)), v is k
        return out.mul_(kind.weight_scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k and v."""
        kind, saved, (num_queries, num_keys) = ctx.kind, ctx.saved_tensors, ctx.rows
        grad = grad * kind.weight_scale
        dq = grad.new_zeros(num_queries, *grad.shape[1:])
        dk = grad.new_zeros(num_keys, *grad.shape[1:])
        dv = None if ctx.values_are_keys else torch.zeros_like(dk)
        for index, group in enumerate(ctx.groups):
            queries, keys, values, weights, scores = saved[5 * index : 5 * index + 5]
            dout = group.queries.pad_gradient(grad)
            dweights = dout @ (keys if values is None else values).transpose(2, 3)
            dscores = _weights_backward(dweights, weights, scores, group.masked, kind)
            group.queries.unpad_into(dq, dscores @ keys)
            dkeys, dvalues = dscores.transpose(2, 3) @ queries, weights.transpose(2, 3) @ dout
            group.keys.unpad_into(dk, dkeys.add_(dvalues) if dv is None else dkeys)
            if dv is not None:
                group.keys.unpad_into(dv, dvalues)
        return dq.mul_(kind.resolve_score_scale(dq.shape[-1])), dk, dv, None, None


def _weights(
    scores: Tensor, masked: Tensor | None, kind: AttentionKind
) -> tuple[Tensor, Tensor | None]:
    """Weights of scores (S, H, Q, K), and the scores if the backward pass needs them."""
    if kind.activation != "softmax":
        if masked is not None:
            scores.masked_fill_(masked, 0.0)
        return ELEMENTWISE_ACTIVATIONS[kind.activation](scores), scores
    if masked is None:
        return scores.softmax(-1), None
    weights = scores.masked_fill_(masked, -torch.inf).softmax(-1)
    return weights.masked_fill_(masked, 0.0), None  # also those of queries without any key


def _weights_backward(
    grad: Tensor,
    weights: Tensor,
    scores: Tensor | None,
    masked: Tensor | None,
    kind: AttentionKind,
) -> Tensor:
    """Gradient of the scores from that of the weights; 0 for masked keys."""
    if scores is None:
        softmax_grad: Tensor = aten._softmax_backward_data(grad, weights, -1, weights.dtype)
        return softmax_grad
    scores_grad = ACTIVATION_BACKWARD[kind.activation](grad, scores)
    return scores_grad if masked is None else scores_grad.masked_fill_(masked, 0.0)
