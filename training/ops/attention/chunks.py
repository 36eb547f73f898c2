"""Causal attention in windows: chunks of all sequences as one batch.

Each chunk attends to itself and to the chunk before. Only the last one of a sequence is filled up,
with at most window - 1 rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from training.ops.attention.kinds import Kind
from training.ops.attention.reference import ELEMENTWISE
from training.ops.ragged import group_of_each


def attention(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, kind: Kind, window: int) -> Tensor:
    """As `training.ops.attention.reference.attention`, for causal kinds."""
    chunks = (offsets.diff() + window - 1) // window
    sequence = group_of_each(offsets)
    position = torch.arange(len(q), device=q.device) - offsets[:-1][sequence]
    first_chunk = F.pad(chunks.cumsum(0), (1, 0))
    slot = first_chunk[sequence] * window + position
    total = int(first_chunk[-1])

    def chunked(x: Tensor) -> Tensor:
        filled = x.new_zeros(total * window, *x.shape[1:]).index_copy(0, slot, x)
        return filled.view(total, window, *x.shape[1:]).transpose(1, 2)

    def with_previous(x: Tensor) -> Tensor:
        return torch.cat((F.pad(x, (0, 0, 0, 0, 0, 0, 1, 0))[:-1], x), dim=2)

    mask = _seen(first_chunk, chunks, window)
    scaled, keys, values = chunked(q), with_previous(chunked(k)), with_previous(chunked(v))
    if kind.activation == "softmax":
        scale = kind.scale(q.shape[-1])
        out = F.scaled_dot_product_attention(scaled, keys, values, attn_mask=mask, scale=scale)
    else:
        scores = scaled * kind.scale(q.shape[-1]) @ keys.transpose(-1, -2)
        out = ELEMENTWISE[kind.activation](scores * mask) @ values
    return out.transpose(1, 2).reshape(total * window, *q.shape[1:])[slot] * kind.outside


def _seen(first_chunk: Tensor, chunks: Tensor, window: int) -> Tensor:
    """Which of the 2 w keys each of a chunk's w queries sees: (C, 1, w, 2 w)."""
    device = chunks.device
    total = int(first_chunk[-1])
    number = torch.arange(total, device=device) - torch.repeat_interleave(first_chunk[:-1], chunks)
    steps = torch.arange(window, device=device)
    own = steps[:, None] >= steps
    before = (number > 0)[:, None, None].expand(total, window, window)
    return torch.cat((before, own.expand(total, window, window)), 2)[:, None]
