"""Selects the attention implementation by device and shape; attention for short sequences.

Under a compiler, attention on a CPU is an operator of its own: its layouts depend on the values of
offsets, which a traced function may not read.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from training.ops.attention import cpu_padded, cpu_tiled, cpu_windowed
from training.ops.attention.reference import SOFTMAX, AttentionKind
from training.ops.ragged import QueryKeyPairs


def segment_attention(q: Tensor, k: Tensor, v: Tensor, pairs: QueryKeyPairs) -> Tensor:
    """Softmax attention for many short sequences: each (query, key) pair is an element.

    Queries (Nq, H, D), keys and values (Nk, H, D) to attended values (Nq, H, D), zeros for queries
    without keys.
    """
    query, key = pairs
    scores = (q.index_select(0, query) * k.index_select(0, key)).sum(-1) / q.shape[-1] ** 0.5
    index = query[:, None].expand_as(scores)
    max_score = scores.new_zeros(q.shape[:2]).scatter_reduce(
        0, index, scores.detach(), "amax", include_self=False
    )
    weight = torch.exp(scores - max_score.index_select(0, query))
    total = torch.zeros_like(max_score).index_add(0, query, weight)
    weighted = weight[..., None] * v.index_select(0, key)
    out = torch.zeros_like(q).index_add(0, query, weighted)
    return out / total.clamp(min=torch.finfo(q.dtype).tiny)[..., None]


class CpuPlan(NamedTuple):
    """How attention is computed on a CPU: `function.apply(q, k, v, layout, kind)`."""

    function: type[torch.autograd.Function]
    layout: object


def plan_cpu(
    q: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    kind: AttentionKind,
    window: int | None,
    limits: Tensor | None,
) -> CpuPlan:
    """Tiles, which are batched over sequences if there is a window.

    A few queries per sequence are padded instead, and take one product for all sequences.
    """
    if window is not None:
        layout = cpu_windowed.tile_layout(q_offsets, window, q.shape[1])
        return CpuPlan(cpu_windowed.WindowedAttention, layout)
    if not kind.causal:
        q_cuts, kv_cuts = q_offsets.numpy(), kv_offsets.numpy()
        queries, keys = np.diff(q_cuts), np.diff(kv_cuts)
        groups = cpu_padded.group_sequences(queries, keys)
        if cpu_padded.is_efficient(queries, keys, groups):
            built = cpu_padded.build_groups(q_cuts, kv_cuts, groups, limits)
            return CpuPlan(cpu_padded.PaddedAttention, built)
    tiles = cpu_tiled.tile_list(q, q_offsets, kv_offsets, kind, limits)
    return CpuPlan(cpu_tiled.TiledAttention, tiles)


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
    """Attention on a CPU, by the fastest layout.

    Args and result are those of `training.ops.attention.reference.attention`.
    """
    plan = plan_cpu(q, q_offsets, kv_offsets, kind, window, limits)
    apply: Callable[..., Tensor] = plan.function.apply
    return apply(q, k, v, plan.layout, kind)


def narrowest_type(*tensors: Tensor) -> torch.dtype:
    """The type with the fewest bytes."""
    narrowest = tensors[0].dtype
    for tensor in tensors[1:]:
        if tensor.dtype.itemsize < narrowest.itemsize:
            narrowest = tensor.dtype
    return narrowest


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
    narrowest = narrowest_type(q, k, v)
    values_are_keys = v is k
    q, k = q.to(narrowest), k.to(narrowest)
    v = k if values_are_keys else v.to(narrowest)
    if q.is_cuda:
        from training.ops.attention import triton

        return triton.attention(q, k, v, q_offsets, kv_offsets, kind, window, limits)
    if torch.compiler.is_compiling():
        out: Tensor = compiled_cpu_attention(
            q, k, v, q_offsets, kv_offsets, kind.activation, kind.causal,
            kind.resolve_score_scale(q.shape[-1]), kind.weight_scale, window, limits,
        )  # fmt: skip
        return out
    return cpu_attention(q, k, v, q_offsets, kv_offsets, kind, window, limits)


class _Saved:
    """Stands for the context of an autograd function whose passes are called directly."""

    saved_tensors: tuple[Tensor | None, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep the tensors."""
        self.saved_tensors = tensors


@torch.library.custom_op("gemline::cpu_attention", mutates_args=())
def compiled_cpu_attention(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, activation: str,
    causal: bool, score_scale: float, weight_scale: float, window: int | None,
    limits: Tensor | None,
) -> Tensor:  # fmt: skip
    """`cpu_attention` as an operator that a compiler calls, but does not look into."""
    kind = AttentionKind(activation, causal, score_scale, weight_scale)  # type: ignore[arg-type]
    plan = plan_cpu(q, q_offsets, kv_offsets, kind, window, limits)
    out: Tensor = plan.function.forward(_Saved(), q, k, v, plan.layout, kind)
    return out.contiguous()


@compiled_cpu_attention.register_fake
def _attention_shape(q: Tensor, *_args: object) -> Tensor:
    return q.new_empty(q.shape)


@torch.library.custom_op("gemline::cpu_attention_backward", mutates_args=())
def _compiled_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor,
    activation: str, causal: bool, score_scale: float, weight_scale: float, window: int | None,
    limits: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The backward pass, which recomputes the weights: an operator can keep its inputs alone."""
    kind = AttentionKind(activation, causal, score_scale, weight_scale)  # type: ignore[arg-type]
    plan, saved = plan_cpu(q, q_offsets, kv_offsets, kind, window, limits), _Saved()
    plan.function.forward(saved, q, k, v, plan.layout, kind)
    dq, dk, dv, *_ = plan.function.backward(saved, grad)
    dv = torch.zeros_like(v) if dv is None else dv
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@_compiled_backward.register_fake
def _gradient_shapes(
    _grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_args: object
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    *tensors, activation, causal, score_scale, weight_scale, window, limits = inputs
    ctx.save_for_backward(*tensors, limits)
    ctx.options = activation, causal, score_scale, weight_scale, window


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, limits = ctx.saved_tensors
    gradients = _compiled_backward(grad, *tensors, *ctx.options, limits)
    return *gradients, *[None] * 8


compiled_cpu_attention.register_autograd(_backward, setup_context=_keep_inputs)
