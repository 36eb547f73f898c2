"""Selects the attention implementation by device and shape; attention for short sequences."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from training.ops.attention import cpu_padded, cpu_tiled, cpu_windowed
from training.ops.attention.reference import SOFTMAX, AttentionKind
from training.ops.ragged import concat_ranges, segment_ids


def segment_attention(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor
) -> Tensor:
    """Softmax attention for many short sequences: each (query, key) pair is an element.

    Args and result are those of `training.ops.attention.reference.attention`.
    """
    query, key = query_key_pairs(q_offsets, kv_offsets)
    scores = (q[query] * k[key]).sum(-1) / q.shape[-1] ** 0.5
    index = query[:, None].expand_as(scores)
    max_score = scores.new_zeros(q.shape[:2]).scatter_reduce(
        0, index, scores.detach(), "amax", include_self=False
    )
    weight = torch.exp(scores - max_score[query])
    total = torch.zeros_like(max_score).index_add(0, query, weight)
    out = torch.zeros_like(q).index_add(0, query, weight[..., None] * v[key])
    return out / total.clamp(min=torch.finfo(q.dtype).tiny)[..., None]


class QueryKeyPairs(NamedTuple):
    """Position of the query and of the key of each pair."""

    query: Tensor
    key: Tensor


def query_key_pairs(q_offsets: Tensor, kv_offsets: Tensor) -> QueryKeyPairs:
    """All pairs of a query and a key of the same sequence, ordered by query."""
    queries, keys = q_offsets.diff(), kv_offsets.diff()
    keys_of_query = torch.repeat_interleave(keys, queries)
    first_key = torch.repeat_interleave(kv_offsets[:-1], queries)
    pairs = concat_ranges(first_key, keys_of_query)
    return QueryKeyPairs(query=segment_ids(pairs.offsets), key=pairs.positions)


def cpu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    kind: AttentionKind = SOFTMAX,
    window: int | None = None,
    limits: Tensor | None = None,
) -> Tensor:
    """Attention on a CPU, in tiles: batched over sequences if there is a window.

    A few queries per sequence are padded instead, and take one product for all sequences.

    Args and result are those of `training.ops.attention.reference.attention`.
    """
    if window is not None:
        return cpu_windowed.attention(q, k, v, q_offsets, kind, window)
    if not kind.causal:
        q_cuts, kv_cuts = q_offsets.numpy(), kv_offsets.numpy()
        queries, keys = np.diff(q_cuts), np.diff(kv_cuts)
        groups = cpu_padded.group_sequences(queries, keys)
        if cpu_padded.is_efficient(queries, keys, groups):
            return cpu_padded.attention(q, k, v, q_cuts, kv_cuts, groups, kind, limits)
    return cpu_tiled.attention(q, k, v, q_offsets, kv_offsets, kind, limits)


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
    """Attention by the fastest implementation for the device of the tensors.

    Args and result are those of `training.ops.attention.reference.attention`; inputs are cast to
    the narrowest of their types, because autocast may produce different ones.
    """
    narrowest = min((x.dtype for x in (q, k, v)), key=lambda dtype: dtype.itemsize)
    q, k, v = (x.to(narrowest) for x in (q, k, v))
    if q.is_cuda:
        from training.ops.attention import triton

        return triton.attention(q, k, v, q_offsets, kv_offsets, kind, window, limits)
    return cpu_attention(q, k, v, q_offsets, kv_offsets, kind, window, limits)
