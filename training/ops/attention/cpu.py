"""The fast path on a CPU, by shape: windows go in chunks, all else in rectangles."""

from torch import Tensor

from training.ops.attention import blocks, chunks
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
    """As `training.ops.attention.reference.attention`."""
    if window is None:
        return blocks.attention(q, k, v, q_offsets, kv_offsets, kind, limits)
    return chunks.attention(q, k, v, q_offsets, kind, window)
