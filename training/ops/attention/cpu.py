"""The fast path on a CPU: dense kernels on whole sequences or chunks, no padding to the longest.

A loop over sequences beats padding and nested tensors on CPUs, and windows go in chunks. `split`
and not slices: the backward pass of a slice fills a tensor as large as the whole.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from training.ops.ragged import group_of_each


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    window: int | None = None,
) -> Tensor:
    """As `training.ops.attention.reference.attention`."""
    if window is not None:
        return _windowed(q, k, v, q_offsets, window)
    q_parts = q.split(q_offsets.diff().tolist())
    kv_lengths = kv_offsets.diff().tolist()
    parts = [
        _dense(*sequence)
        if len(sequence[0]) and len(sequence[1])
        else torch.zeros_like(sequence[0])
        for sequence in zip(q_parts, k.split(kv_lengths), v.split(kv_lengths), strict=True)
    ]
    nothing = (k[:0].sum() + v[:0].sum()) * 0  # keeps every input in the graph
    return torch.cat(parts) + nothing if parts else q + nothing


def _dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    heads = F.scaled_dot_product_attention(q, k, v)
    return heads[0].transpose(0, 1)


def _windowed(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, window: int) -> Tensor:
    """Chunks of all sequences as one batch; each attends to itself and to the chunk before.

    Only the last chunk of a sequence is filled up, with at most `window` - 1 rows.
    """
    lengths = offsets.diff()
    chunks = (lengths + window - 1) // window
    sequence = group_of_each(offsets)
    position = torch.arange(len(q), device=q.device) - offsets[:-1][sequence]
    first_chunk = F.pad(chunks.cumsum(0), (1, 0))
    slot = first_chunk[sequence] * window + position
    total = int(first_chunk[-1])
    chunk_number = torch.arange(total, device=q.device) - torch.repeat_interleave(
        first_chunk[:-1], chunks
    )

    def chunked(x: Tensor) -> Tensor:
        filled = x.new_zeros(total * window, *x.shape[1:]).index_copy(0, slot, x)
        return filled.view(total, window, *x.shape[1:]).transpose(1, 2)

    def with_previous(x: Tensor) -> Tensor:
        return torch.cat((F.pad(x, (0, 0, 0, 0, 0, 0, 1, 0))[:-1], x), dim=2)

    steps = torch.arange(window, device=q.device)
    causal = torch.cat(
        (torch.ones(window, window, dtype=torch.bool, device=q.device), steps[:, None] >= steps), 1
    )
    opening = causal & torch.cat((torch.zeros_like(steps), torch.ones_like(steps))).bool()
    mask = torch.where((chunk_number > 0)[:, None, None], causal, opening)[:, None]
    out = F.scaled_dot_product_attention(
        chunked(q), with_previous(chunked(k)), with_previous(chunked(v)), attn_mask=mask
    )
    return out.transpose(1, 2).reshape(total * window, *q.shape[1:])[slot]
