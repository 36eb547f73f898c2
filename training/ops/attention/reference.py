"""Reference implementation of ragged attention: one query at a time, used in tests."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["softmax", "silu", "gelu", "relu", "identity"]


@dataclass(frozen=True)
class AttentionKind:
    """How scores become weights: weight = activation(score_scale * q.k) * weight_scale.

    `score_scale` is 1 / sqrt(D) by default. Softmax is over the keys; the other activations are
    elementwise, so that many matching keys weigh more than one. HSTU (2402.17152) is causal "silu"
    with a weight scale of 1/N, where N must be the maximum length of a configuration and not of a
    batch: outputs may not depend on the other sequences. GDPA (Kunlun, 2602.10016) is "gelu" or
    "silu"; the paper scales scores and the published kernel scales weights.
    """

    activation: Activation = "softmax"
    causal: bool = False
    score_scale: float | None = None
    weight_scale: float = 1.0

    def resolve_score_scale(self, head_dim: int) -> float:
        """The scale of scores for heads of this width."""
        return head_dim**-0.5 if self.score_scale is None else self.score_scale

    @property
    def masked_score(self) -> float:
        """A score whose weight is zero."""
        return -torch.inf if self.activation == "softmax" else 0.0


SOFTMAX = AttentionKind()
CAUSAL = AttentionKind(causal=True)


ELEMENTWISE_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "identity": lambda scores: scores,
}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    kind: AttentionKind = SOFTMAX,
    window: int | None = None,
    limits: Tensor | None = None,
) -> Tensor:
    """Attention of each query (Nq, H, D) to the keys (Nk, H, D) of its own sequence.

    Args:
        q: Queries (Nq, H, D).
        k: Keys (Nk, H, D).
        v: Values (Nk, H, D).
        q_offsets: Offsets (S + 1) that cut queries into sequences: from 0 to Nq.
        kv_offsets: Offsets (S + 1) that cut keys into sequences: from 0 to Nk.
        kind: How scores become weights. If causal, q and k have the same positions, and position t
            attends to s <= t.
        window: For causal kinds: position t attends to itself and to the `window` positions before
            it only, t - window <= s <= t.
        limits: For other kinds: a query attends only to the first `limits` (Nq) keys.

    Returns:
        Attended values (Nq, H, D); zeros for queries without keys.
    """
    out = torch.zeros_like(q)
    for sequence in range(len(q_offsets) - 1):
        first, last = int(kv_offsets[sequence]), int(kv_offsets[sequence + 1])
        for row in range(int(q_offsets[sequence]), int(q_offsets[sequence + 1])):
            start, stop = first, last if limits is None else min(last, first + int(limits[row]))
            if kind.causal:
                t = row - int(q_offsets[sequence])
                start = first if window is None else first + max(0, t - window)
                stop = first + t + 1
            if start < stop:
                scores = torch.einsum("hd,shd->hs", q[row], k[start:stop])
                weights = attention_weights(scores * kind.resolve_score_scale(q.shape[-1]), kind)
                out[row] = torch.einsum("hs,shd->hd", weights, v[start:stop])
    return out


def attention_weights(scores: Tensor, kind: AttentionKind) -> Tensor:
    """Weights of scaled scores (…, keys)."""
    if kind.activation == "softmax":
        return scores.softmax(-1) * kind.weight_scale
    return ELEMENTWISE_ACTIVATIONS[kind.activation](scores) * kind.weight_scale
