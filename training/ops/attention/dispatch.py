"""Ragged attention by where the tensors are."""

from torch import Tensor

from training.ops.attention import cpu
from training.ops.attention.kinds import SOFTMAX, Kind


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
    """As `training.ops.attention.reference.attention`, in the narrowest type of the three."""
    narrowest = min((x.dtype for x in (q, k, v)), key=lambda dtype: dtype.itemsize)
    q, k, v = (x.to(narrowest) for x in (q, k, v))
    if q.is_cuda:
        from training.ops.attention import triton

        return triton.attention(q, k, v, q_offsets, kv_offsets, kind, window, limits)
    return cpu.attention(q, k, v, q_offsets, kv_offsets, kind, window, limits)
