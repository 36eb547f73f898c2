"""The truth: what ragged attention is, one query at a time."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from training.ops.attention.kinds import SOFTMAX, Kind

ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
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
    kind: Kind = SOFTMAX,
    window: int | None = None,
    limits: Tensor | None = None,
) -> Tensor:
    """Attention of each query (Nq, H, D) to the keys (Nk, H, D) of its own sequence.

    In a causal kind q and k are the same positions, and position t sees s <= t. With a `window`
    it also sees only its own chunk of `window` and the one before: s // w >= t // w - 1. With
    `limits` (Nq) a query sees the first so many keys of its sequence. One without keys gives zeros.
    Returns (Nq, H, D).
    """
    out = torch.zeros_like(q)
    for sequence in range(len(q_offsets) - 1):
        first, last = int(kv_offsets[sequence]), int(kv_offsets[sequence + 1])
        for row in range(int(q_offsets[sequence]), int(q_offsets[sequence + 1])):
            start, stop = first, last if limits is None else min(last, first + int(limits[row]))
            if kind.causal:
                t = row - int(q_offsets[sequence])
                start = first + max(0, (t // window - 1) * window) if window else first
                stop = first + t + 1
            if start < stop:
                scores = torch.einsum("hd,shd->hs", q[row], k[start:stop])
                weights = weigh(scores * kind.scale(q.shape[-1]), kind)
                out[row] = torch.einsum("hs,shd->hd", weights, v[start:stop])
    return out


def weigh(scores: Tensor, kind: Kind) -> Tensor:
    """Weights of scores (…, keys)."""
    if kind.activation == "softmax":
        return scores.softmax(-1) * kind.outside
    return ELEMENTWISE[kind.activation](scores) * kind.outside
