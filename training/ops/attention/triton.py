"""Ragged attention on a GPU in Triton: softmax and elementwise kinds, windows and limits.

One program handles a head and a block of queries (of keys for the gradients of keys and values);
scores stay in registers. The keys that a query attends to are a span [low, high) of its sequence,
so causal, windowed and limited attention are the same kernel. Products accumulate in fp32. N
positions, H heads, D width of a head, M queries and C keys of a block.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from training.ops.attention.reference import SOFTMAX, AttentionKind
from training.ops.attention.tile_plan import TilePlan

BLOCK_SIZE = 64
MIN_TILE_WIDTH = 16  # smallest side of a product on tensor cores
ACTIVATION_CODES = {"softmax": 0, "silu": 1, "gelu": 2, "relu": 3, "identity": 4}


@triton.jit
def _activation(s, ACT: tl.constexpr):
    """Elementwise weight of a score."""
    if ACT == 1:
        s = s * tl.sigmoid(s)
    elif ACT == 2:
        s = s * 0.5 * (1 + tl.erf(s * 0.7071067811865476))
    elif ACT == 3:
        s = tl.maximum(s, 0.0)
    return s


@triton.jit
def _activation_grad(s, ACT: tl.constexpr):
    """Derivative of `_activation`."""
    if ACT == 1:
        p = tl.sigmoid(s)
        slope = p * (1 + s * (1 - p))
    elif ACT == 2:
        density = tl.exp(-0.5 * s * s) * 0.3989422804014327
        slope = 0.5 * (1 + tl.erf(s * 0.7071067811865476)) + s * density
    elif ACT == 3:
        slope = tl.where(s > 0, 1.0, 0.0)
    else:
        slope = s * 0 + 1.0
    return slope


@triton.jit
def _load_rows(x, rows, head, mask, H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr):
    """Load rows of one head (n, WIDE), zeros beyond D and where masked."""
    d = tl.arange(0, WIDE)
    pointers = x + (rows[:, None] * H + head) * D + d[None, :]
    return tl.load(pointers, mask=mask[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _store_rows(x, rows, head, mask, value, H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr):
    d = tl.arange(0, WIDE)
    pointers = x + (rows[:, None] * H + head) * D + d[None, :]
    tl.store(pointers, value.to(x.dtype.element_ty), mask=mask[:, None] & (d < D)[None, :])


@triton.jit
def _forward(
    q, k, v, out, lse, low, high, first, last, keys_start, begin, end, score_scale, weight_scale,
    H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, ACT: tl.constexpr,
    M: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    query_row = tl.load(first + block) + tl.arange(0, M)
    in_block = query_row < tl.load(last + block)
    lo = tl.load(low + query_row, mask=in_block, other=0)
    hi = tl.load(high + query_row, mask=in_block, other=0)
    base = tl.load(keys_start + block)
    queries = _load_rows(q, query_row, head, in_block, H, D, WIDE)
    acc = tl.zeros([M, WIDE], tl.float32)
    row_max = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    stop = tl.load(end + block)
    for start in range(tl.load(begin + block), stop, C):
        key = start + tl.arange(0, C)
        visible = (key[None, :] >= lo[:, None]) & (key[None, :] < hi[:, None])
        keys = _load_rows(k, base + key, head, key < stop, H, D, WIDE)
        values = _load_rows(v, base + key, head, key < stop, H, D, WIDE)
        s = tl.dot(queries, tl.trans(keys), input_precision="ieee") * score_scale
        if ACT == 0:
            s = tl.where(visible, s, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(s, 1))
            safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
            weights = tl.exp(s - safe_max[:, None])
            rescale = tl.exp(row_max - safe_max)
            total = total * rescale + tl.sum(weights, 1)
            acc = acc * rescale[:, None]
            row_max = new_max
        else:
            weights = tl.where(visible, _activation(s, ACT), 0.0)
        acc += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    if ACT == 0:
        denominator = tl.where(total > 0, total, 1.0)
        acc = acc / denominator[:, None]
        tl.store(lse + query_row * H + head, row_max + tl.log(denominator), mask=in_block)
    _store_rows(out, query_row, head, in_block, acc * weight_scale, H, D, WIDE)


@triton.jit
def _backward_queries(
    q, k, v, grad, dq, lse, delta, low, high, first, last, keys_start, begin, end, score_scale,
    weight_scale,
    H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, ACT: tl.constexpr,
    M: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    query_row = tl.load(first + block) + tl.arange(0, M)
    in_block = query_row < tl.load(last + block)
    lo = tl.load(low + query_row, mask=in_block, other=0)
    hi = tl.load(high + query_row, mask=in_block, other=0)
    base = tl.load(keys_start + block)
    queries = _load_rows(q, query_row, head, in_block, H, D, WIDE)
    dout = _load_rows(grad, query_row, head, in_block, H, D, WIDE)
    row_lse = tl.load(lse + query_row * H + head, mask=in_block, other=0.0)
    row_delta = tl.load(delta + query_row * H + head, mask=in_block, other=0.0)
    acc = tl.zeros([M, WIDE], tl.float32)
    stop = tl.load(end + block)
    for start in range(tl.load(begin + block), stop, C):
        key = start + tl.arange(0, C)
        visible = (key[None, :] >= lo[:, None]) & (key[None, :] < hi[:, None])
        keys = _load_rows(k, base + key, head, key < stop, H, D, WIDE)
        values = _load_rows(v, base + key, head, key < stop, H, D, WIDE)
        s = tl.dot(queries, tl.trans(keys), input_precision="ieee") * score_scale
        dw = tl.dot(dout, tl.trans(values), input_precision="ieee") * weight_scale
        if ACT == 0:
            ds = tl.where(visible, tl.exp(tl.where(visible, s - row_lse[:, None], 0.0)), 0.0)
            ds = ds * (dw - row_delta[:, None])
        else:
            ds = tl.where(visible, _activation_grad(s, ACT) * dw, 0.0)
        acc += tl.dot(ds.to(keys.dtype), keys, input_precision="ieee")
    _store_rows(dq, query_row, head, in_block, acc * score_scale, H, D, WIDE)


@triton.jit
def _backward_keys(
    q, k, v, grad, dk, dv, lse, delta, low, high, first, last, keys_start, begin, end, score_scale,
    weight_scale,
    H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, ACT: tl.constexpr,
    M: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(first + block) + tl.arange(0, C)
    in_block = row < tl.load(last + block)
    key = row - tl.load(keys_start + block)
    keys = _load_rows(k, row, head, in_block, H, D, WIDE)
    values = _load_rows(v, row, head, in_block, H, D, WIDE)
    dk_acc = tl.zeros([C, WIDE], tl.float32)
    dv_acc = tl.zeros([C, WIDE], tl.float32)
    stop = tl.load(end + block)
    for start in range(tl.load(begin + block), stop, M):
        query_row = start + tl.arange(0, M)
        in_span = query_row < stop
        lo = tl.load(low + query_row, mask=in_span, other=0)
        hi = tl.load(high + query_row, mask=in_span, other=0)
        visible = (key[:, None] >= lo[None, :]) & (key[:, None] < hi[None, :]) & in_block[:, None]
        queries = _load_rows(q, query_row, head, in_span, H, D, WIDE)
        dout = _load_rows(grad, query_row, head, in_span, H, D, WIDE)
        s = tl.dot(keys, tl.trans(queries), input_precision="ieee") * score_scale
        dw = tl.dot(values, tl.trans(dout), input_precision="ieee") * weight_scale
        if ACT == 0:
            row_lse = tl.load(lse + query_row * H + head, mask=in_span, other=0.0)
            row_delta = tl.load(delta + query_row * H + head, mask=in_span, other=0.0)
            weights = tl.where(visible, tl.exp(tl.where(visible, s - row_lse[None, :], 0.0)), 0.0)
            ds = weights * (dw - row_delta[None, :])
        else:
            weights = tl.where(visible, _activation(s, ACT), 0.0)
            ds = tl.where(visible, _activation_grad(s, ACT) * dw, 0.0)
        dv_acc += tl.dot(weights.to(dout.dtype), dout, input_precision="ieee")
        dk_acc += tl.dot(ds.to(queries.dtype), queries, input_precision="ieee")
    _store_rows(dv, row, head, in_block, dv_acc * weight_scale, H, D, WIDE)
    _store_rows(dk, row, head, in_block, dk_acc * score_scale, H, D, WIDE)


class _TritonAttention(torch.autograd.Function):
    """Attention by a tile plan; q, k and v are (N, H, D)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: TilePlan, kind: AttentionKind, block: int
    ) -> Tensor:
        n, heads, width = q.shape
        out = torch.zeros_like(q)
        lse = q.new_zeros((n, heads), dtype=torch.float32)
        ctx.meta = {
            "H": heads, "D": width, "WIDE": max(MIN_TILE_WIDTH, triton.next_power_of_2(width)),
            "ACT": ACTIVATION_CODES[kind.activation], "M": block, "C": block,
        }  # fmt: skip
        ctx.scales = kind.resolve_score_scale(width), kind.weight_scale
        if grid := len(plan.queries.first):
            _forward[(grid, heads)](
                q,
                k,
                v,
                out,
                lse,
                plan.low,
                plan.high,
                *plan.queries.kernel_args,
                *ctx.scales,
                **ctx.meta,
            )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        plan, grad, heads = ctx.plan, grad.contiguous(), q.shape[1]
        delta = (grad.float() * out.float()).sum(2)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        shared = lse, delta, plan.low, plan.high
        if grid := len(plan.queries.first):
            _backward_queries[(grid, heads)](
                q, k, v, grad, dq, *shared, *plan.queries.kernel_args, *ctx.scales, **ctx.meta
            )
        if grid := len(plan.keys.first):
            _backward_keys[(grid, heads)](
                q, k, v, grad, dk, dv, *shared, *plan.keys.kernel_args, *ctx.scales, **ctx.meta
            )
        return dq, dk, dv, None, None, None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    kind: AttentionKind = SOFTMAX,
    window: int | None = None,
    limits: Tensor | None = None,
    block_size: int = BLOCK_SIZE,
) -> Tensor:
    """Attention on a GPU.

    Args and result are those of `training.ops.attention.reference.attention`.
    """
    plan = TilePlan.build(len(q), len(k), q_offsets, kv_offsets, kind, window, limits, block_size)
    apply: Callable[..., Tensor] = _TritonAttention.apply
    return apply(q.contiguous(), k.contiguous(), v.contiguous(), plan, kind, block_size)
