"""The truth: what ragged attention is, one query at a time."""

import torch
from torch import Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    window: int | None = None,
) -> Tensor:
    """Softmax attention of each query (Nq, H, D) to the keys (Nk, H, D) of its own sequence.

    With a window, q and k are the same positions, and position t sees the positions s of its own
    chunk of `window` and of the chunk before it, up to itself: s <= t, s // w >= t // w - 1.
    A query without keys gives zeros. Returns (Nq, H, D).
    """
    out = torch.zeros_like(q)
    for sequence in range(len(q_offsets) - 1):
        first, last = int(kv_offsets[sequence]), int(kv_offsets[sequence + 1])
        for row in range(int(q_offsets[sequence]), int(q_offsets[sequence + 1])):
            start, stop = first, last
            if window is not None:
                t = row - int(q_offsets[sequence])
                start, stop = first + max(0, (t // window - 1) * window), first + t + 1
            if start < stop:
                scores = torch.einsum("hd,shd->hs", q[row], k[start:stop]) / q.shape[-1] ** 0.5
                out[row] = torch.einsum("hs,shd->hd", scores.softmax(-1), v[start:stop])
    return out
