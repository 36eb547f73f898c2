"""Ragged attention on a GPU: softmax and element-wise kinds, windows and limits, in stock Triton.

One program a block of queries (or of keys, for their gradients) and head; scores live in registers.
Which keys a query sees is a span of its sequence, [low, high), told by row: causal, windowed and
limited attention are the same kernel. Products accumulate in fp32 whatever the inputs are.
N positions, H heads, D width of a head, M queries and C keys of a block.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from training.ops.attention.kinds import SOFTMAX, Kind
from training.ops.attention.spans import Plan

BLOCK = 64
SMALLEST = 16  # side of a product on tensor cores
ACTIVATIONS = {"softmax": 0, "silu": 1, "gelu": 2, "relu": 3, "identity": 4}


@triton.jit
def _weigh(s, ACT: tl.constexpr):
    """An element-wise weight of a score."""
    if ACT == 1:
        s = s * tl.sigmoid(s)
    elif ACT == 2:
        s = s * 0.5 * (1 + tl.erf(s * 0.7071067811865476))
    elif ACT == 3:
        s = tl.maximum(s, 0.0)
    return s


@triton.jit
def _slope(s, ACT: tl.constexpr):
    """Its derivative."""
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
def _rows(x, at, head, there, H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr):
    """Rows of one head (n, WIDE), zeros beyond D and where there is none."""
    d = tl.arange(0, WIDE)
    where = x + (at[:, None] * H + head) * D + d[None, :]
    return tl.load(where, mask=there[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _put(x, at, head, there, value, H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr):
    d = tl.arange(0, WIDE)
    where = x + (at[:, None] * H + head) * D + d[None, :]
    tl.store(where, value.to(x.dtype.element_ty), mask=there[:, None] & (d < D)[None, :])


@triton.jit
def _forward(
    q, k, v, out, lse, low, high, first, last, keys_from, begin, end, inside, outside,
    H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, ACT: tl.constexpr,
    M: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    at = tl.load(first + block) + tl.arange(0, M)
    there = at < tl.load(last + block)
    lo = tl.load(low + at, mask=there, other=0)
    hi = tl.load(high + at, mask=there, other=0)
    base = tl.load(keys_from + block)
    queries = _rows(q, at, head, there, H, D, WIDE)
    summed = tl.zeros([M, WIDE], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    stop = tl.load(end + block)
    for start in range(tl.load(begin + block), stop, C):
        key = start + tl.arange(0, C)
        seen = (key[None, :] >= lo[:, None]) & (key[None, :] < hi[:, None])
        keys = _rows(k, base + key, head, key < stop, H, D, WIDE)
        values = _rows(v, base + key, head, key < stop, H, D, WIDE)
        s = tl.dot(queries, tl.trans(keys), input_precision="ieee") * inside
        if ACT == 0:
            s = tl.where(seen, s, float("-inf"))
            highest = tl.maximum(top, tl.max(s, 1))
            safe = tl.where(highest == float("-inf"), 0.0, highest)
            weights = tl.exp(s - safe[:, None])
            shrink = tl.exp(top - safe)
            total = total * shrink + tl.sum(weights, 1)
            summed = summed * shrink[:, None]
            top = highest
        else:
            weights = tl.where(seen, _weigh(s, ACT), 0.0)
        summed += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    if ACT == 0:
        alive = tl.where(total > 0, total, 1.0)
        summed = summed / alive[:, None]
        tl.store(lse + at * H + head, top + tl.log(alive), mask=there)
    _put(out, at, head, there, summed * outside, H, D, WIDE)


@triton.jit
def _backward_queries(
    q, k, v, grad, dq, lse, delta, low, high, first, last, keys_from, begin, end, inside, outside,
    H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, ACT: tl.constexpr,
    M: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    at = tl.load(first + block) + tl.arange(0, M)
    there = at < tl.load(last + block)
    lo = tl.load(low + at, mask=there, other=0)
    hi = tl.load(high + at, mask=there, other=0)
    base = tl.load(keys_from + block)
    queries = _rows(q, at, head, there, H, D, WIDE)
    given = _rows(grad, at, head, there, H, D, WIDE)
    known = tl.load(lse + at * H + head, mask=there, other=0.0)
    mean = tl.load(delta + at * H + head, mask=there, other=0.0)
    summed = tl.zeros([M, WIDE], tl.float32)
    stop = tl.load(end + block)
    for start in range(tl.load(begin + block), stop, C):
        key = start + tl.arange(0, C)
        seen = (key[None, :] >= lo[:, None]) & (key[None, :] < hi[:, None])
        keys = _rows(k, base + key, head, key < stop, H, D, WIDE)
        values = _rows(v, base + key, head, key < stop, H, D, WIDE)
        s = tl.dot(queries, tl.trans(keys), input_precision="ieee") * inside
        dw = tl.dot(given, tl.trans(values), input_precision="ieee") * outside
        if ACT == 0:
            ds = tl.where(seen, tl.exp(tl.where(seen, s - known[:, None], 0.0)), 0.0)
            ds = ds * (dw - mean[:, None])
        else:
            ds = tl.where(seen, _slope(s, ACT) * dw, 0.0)
        summed += tl.dot(ds.to(keys.dtype), keys, input_precision="ieee")
    _put(dq, at, head, there, summed * inside, H, D, WIDE)


@triton.jit
def _backward_keys(
    q, k, v, grad, dk, dv, lse, delta, low, high, first, last, keys_from, begin, end, inside,
    outside,
    H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, ACT: tl.constexpr,
    M: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(first + block) + tl.arange(0, C)
    there = row < tl.load(last + block)
    key = row - tl.load(keys_from + block)
    keys = _rows(k, row, head, there, H, D, WIDE)
    values = _rows(v, row, head, there, H, D, WIDE)
    by_keys = tl.zeros([C, WIDE], tl.float32)
    by_values = tl.zeros([C, WIDE], tl.float32)
    stop = tl.load(end + block)
    for start in range(tl.load(begin + block), stop, M):
        at = start + tl.arange(0, M)
        inner = at < stop
        lo = tl.load(low + at, mask=inner, other=0)
        hi = tl.load(high + at, mask=inner, other=0)
        seen = (key[:, None] >= lo[None, :]) & (key[:, None] < hi[None, :]) & there[:, None]
        queries = _rows(q, at, head, inner, H, D, WIDE)
        given = _rows(grad, at, head, inner, H, D, WIDE)
        s = tl.dot(keys, tl.trans(queries), input_precision="ieee") * inside
        dw = tl.dot(values, tl.trans(given), input_precision="ieee") * outside
        if ACT == 0:
            known = tl.load(lse + at * H + head, mask=inner, other=0.0)
            mean = tl.load(delta + at * H + head, mask=inner, other=0.0)
            weights = tl.where(seen, tl.exp(tl.where(seen, s - known[None, :], 0.0)), 0.0)
            ds = weights * (dw - mean[None, :])
        else:
            weights = tl.where(seen, _weigh(s, ACT), 0.0)
            ds = tl.where(seen, _slope(s, ACT) * dw, 0.0)
        by_values += tl.dot(weights.to(given.dtype), given, input_precision="ieee")
        by_keys += tl.dot(ds.to(queries.dtype), queries, input_precision="ieee")
    _put(dv, row, head, there, by_values * outside, H, D, WIDE)
    _put(dk, row, head, there, by_keys * inside, H, D, WIDE)


class _Triton(torch.autograd.Function):
    """q, k, v (N, H, D)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan, kind: Kind, block: int
    ) -> Tensor:
        n, heads, width = q.shape
        out = torch.zeros_like(q)
        lse = q.new_zeros((n, heads), dtype=torch.float32)
        ctx.meta = {
            "H": heads, "D": width, "WIDE": max(SMALLEST, triton.next_power_of_2(width)),
            "ACT": ACTIVATIONS[kind.activation], "M": block, "C": block,
        }  # fmt: skip
        ctx.scales = kind.scale(width), kind.outside
        if grid := len(plan.queries.first):
            _forward[(grid, heads)](
                q, k, v, out, lse, plan.low, plan.high, *plan.queries.told, *ctx.scales, **ctx.meta
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
                q, k, v, grad, dq, *shared, *plan.queries.told, *ctx.scales, **ctx.meta
            )
        if grid := len(plan.keys.first):
            _backward_keys[(grid, heads)](
                q, k, v, grad, dk, dv, *shared, *plan.keys.told, *ctx.scales, **ctx.meta
            )
        return dq, dk, dv, None, None, None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    kind: Kind = SOFTMAX,
    window: int | None = None,
    limits: Tensor | None = None,
    block: int = BLOCK,
) -> Tensor:
    """As `training.ops.attention.reference.attention`."""
    plan = Plan.of(q_offsets, kv_offsets, kind, window, limits, block)
    return _Triton.apply(q.contiguous(), k.contiguous(), v.contiguous(), plan, kind, block)
