"""For many short sequences: every (query, key) pair is a row, and softmax goes by segments."""

import torch
from torch import Tensor

from training.ops.ragged import group_of_each, runs


def attention(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor) -> Tensor:
    """As `training.ops.attention.reference.attention`, without a window."""
    query, key = pairs(q_offsets, kv_offsets)
    scores = (q[query] * k[key]).sum(-1) / q.shape[-1] ** 0.5
    index = query[:, None].expand_as(scores)
    top = scores.new_zeros(q.shape[:2]).scatter_reduce(
        0, index, scores.detach(), "amax", include_self=False
    )
    weight = torch.exp(scores - top[query])
    total = torch.zeros_like(top).index_add(0, query, weight)
    out = torch.zeros_like(q).index_add(0, query, weight[..., None] * v[key])
    return out / total.clamp(min=torch.finfo(q.dtype).tiny)[..., None]


def pairs(q_offsets: Tensor, kv_offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the query and of the key of every pair of the same sequence."""
    queries, keys = q_offsets.diff(), kv_offsets.diff()
    mine = torch.repeat_interleave(keys, queries)
    key, offsets = runs(torch.repeat_interleave(kv_offsets[:-1], queries), mine)
    return group_of_each(offsets), key
