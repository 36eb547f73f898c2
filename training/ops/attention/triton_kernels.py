"""Triton kernels of ragged attention: forward, and gradients of queries, of keys and values.

One program handles a head and a block of queries (of keys for the gradients of keys and values);
scores stay in registers. The keys that a query attends to are a span [low, high) of its sequence,
so causal, windowed and limited attention are the same kernel. Tiles in which all pairs attend are
computed without a mask. Products accumulate in fp32. H heads, D width of a head, WIDE the power of
two above it, M queries and C keys of a tile, ACT the code of an activation.
"""

import triton
import triton.language as tl

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
def _dot(a, b, PRECISION: tl.constexpr):
    """The product of two tiles, accumulated in fp32."""
    if PRECISION == "widened":
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        product = tl.dot(a, b, input_precision=PRECISION)
    return product


@triton.jit
def _load_rows(
    x, rows, head, mask, H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr
):
    """Load rows of one head (n, WIDE), zeros beyond D and, if masked, where the mask is false."""
    d = tl.arange(0, WIDE)
    pointers = x + (rows[:, None] * H + head) * D + d[None, :]
    if MASKED:
        value = tl.load(pointers, mask=mask[:, None] & (d < D)[None, :], other=0.0)
    elif D == WIDE:
        value = tl.load(pointers)
    else:
        value = tl.load(pointers, mask=(d < D)[None, :], other=0.0)
    return value


@triton.jit
def _store_rows(x, rows, head, mask, value, H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr):
    d = tl.arange(0, WIDE)
    pointers = x + (rows[:, None] * H + head) * D + d[None, :]
    tl.store(pointers, value.to(x.dtype.element_ty), mask=mask[:, None] & (d < D)[None, :])


@triton.jit
def _split_span(begin, full_begin, full_end, end, TILE: tl.constexpr):
    """Split a span into full tiles and masked tiles before and after them.

    Returns the first row of the full tiles, their number, and the numbers of masked tiles before
    them and in total.
    """
    before = tl.cdiv(tl.maximum(full_begin - begin, 0), TILE)
    full = begin + before * TILE
    full_count = tl.maximum(tl.minimum(full_end, end) - full, 0) // TILE
    before = tl.where(full_count > 0, before, 0)
    full = begin + before * TILE
    after = tl.cdiv(tl.maximum(end - full - full_count * TILE, 0), TILE)
    return full, full_count, before, before + after


@triton.jit
def _tile_start(i, begin, before, full_count, TILE: tl.constexpr, MASKED: tl.constexpr):
    """The first row of a tile; masked tiles lie before and after the full ones."""
    start = begin + i * TILE
    if MASKED:
        start += tl.where(i < before, 0, full_count * TILE)
    return start


@triton.jit
def _forward_tiles(
    acc, row_max, total, queries, k, v, lo, hi, base, head, begin, count, before,
    full_count, end, score_scale,
    H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, ACT: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the full tiles of keys, or the masked ones, to the sums of a block of queries."""
    for i in range(count):
        start = _tile_start(i, begin, before, full_count, C, MASKED)
        key = start + tl.arange(0, C)
        keys = _load_rows(k, base + key, head, key < end, H, D, WIDE, MASKED)
        values = _load_rows(v, base + key, head, key < end, H, D, WIDE, MASKED)
        s = _dot(queries, tl.trans(keys), PRECISION) * score_scale
        if MASKED:
            visible = (key[None, :] >= lo[:, None]) & (key[None, :] < hi[:, None])
            visible = visible & (key < end)[None, :]
        if ACT == 0:
            if MASKED:
                s = tl.where(visible, s, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(s, 1))
            safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
            weights = tl.exp(s - safe_max[:, None])
            rescale = tl.exp(row_max - safe_max)
            total = total * rescale + tl.sum(weights, 1)
            acc = acc * rescale[:, None]
            row_max = new_max
        else:
            weights = _activation(s, ACT)
            if MASKED:
                weights = tl.where(visible, weights, 0.0)
        acc += _dot(weights.to(values.dtype), values, PRECISION)
    return acc, row_max, total


@triton.jit
def forward(
    q, k, v, out, lse, low, high, first, last, keys_start, begin, full_begin, full_end, end,
    score_scale, weight_scale,
    H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, ACT: tl.constexpr,
    PRECISION: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
) -> None:  # fmt: skip
    """Attention of a block of queries to the keys of its span."""
    block, head = tl.program_id(0), tl.program_id(1)
    query_row = tl.load(first + block) + tl.arange(0, M)
    in_block = query_row < tl.load(last + block)
    lo = tl.load(low + query_row, mask=in_block, other=0)
    hi = tl.load(high + query_row, mask=in_block, other=0)
    base = tl.load(keys_start + block)
    queries = _load_rows(q, query_row, head, in_block, H, D, WIDE, True)
    acc = tl.zeros([M, WIDE], tl.float32)
    row_max = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    b, e = tl.load(begin + block), tl.load(end + block)
    full, full_count, before, masked_count = _split_span(
        b, tl.load(full_begin + block), tl.load(full_end + block), e, C
    )
    acc, row_max, total = _forward_tiles(
        acc, row_max, total, queries, k, v, lo, hi, base, head, b, masked_count, before,
        full_count, e, score_scale, H, D, WIDE, ACT, C, PRECISION, True,
    )  # fmt: skip
    acc, row_max, total = _forward_tiles(
        acc, row_max, total, queries, k, v, lo, hi, base, head, full, full_count, 0, 0, e,
        score_scale, H, D, WIDE, ACT, C, PRECISION, False,
    )  # fmt: skip
    if ACT == 0:
        denominator = tl.where(total > 0, total, 1.0)
        acc = acc / denominator[:, None]
        tl.store(lse + query_row * H + head, row_max + tl.log(denominator), mask=in_block)
    _store_rows(out, query_row, head, in_block, acc * weight_scale, H, D, WIDE)


@triton.jit
def _query_grad_tiles(
    acc, queries, dout, row_lse, row_delta, k, v, lo, hi, base, head, begin, count, before,
    full_count, end, score_scale, weight_scale,
    H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, ACT: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the full tiles of keys, or the masked ones, to the gradients of a block of queries."""
    for i in range(count):
        start = _tile_start(i, begin, before, full_count, C, MASKED)
        key = start + tl.arange(0, C)
        keys = _load_rows(k, base + key, head, key < end, H, D, WIDE, MASKED)
        values = _load_rows(v, base + key, head, key < end, H, D, WIDE, MASKED)
        s = _dot(queries, tl.trans(keys), PRECISION) * score_scale
        dw = _dot(dout, tl.trans(values), PRECISION) * weight_scale
        if MASKED:
            visible = (key[None, :] >= lo[:, None]) & (key[None, :] < hi[:, None])
            visible = visible & (key < end)[None, :]
            s = tl.where(visible, s, 0.0)
        if ACT == 0:
            exponent = s - row_lse[:, None]
            if MASKED:
                exponent = tl.where(visible, exponent, 0.0)
            ds = tl.exp(exponent) * (dw - row_delta[:, None])
        else:
            ds = _activation_grad(s, ACT) * dw
        if MASKED:
            ds = tl.where(visible, ds, 0.0)
        acc += _dot(ds.to(keys.dtype), keys, PRECISION)
    return acc


@triton.jit
def backward_queries(
    q, k, v, out, grad, dq, lse, delta, low, high, first, last, keys_start, begin, full_begin,
    full_end, end, score_scale, weight_scale,
    H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, ACT: tl.constexpr,
    PRECISION: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
) -> None:  # fmt: skip
    """Gradients of a block of queries, and `delta`: the products of outputs and their gradients."""
    block, head = tl.program_id(0), tl.program_id(1)
    query_row = tl.load(first + block) + tl.arange(0, M)
    in_block = query_row < tl.load(last + block)
    lo = tl.load(low + query_row, mask=in_block, other=0)
    hi = tl.load(high + query_row, mask=in_block, other=0)
    base = tl.load(keys_start + block)
    queries = _load_rows(q, query_row, head, in_block, H, D, WIDE, True)
    dout = _load_rows(grad, query_row, head, in_block, H, D, WIDE, True)
    row_lse = tl.load(lse + query_row * H + head, mask=in_block, other=0.0)
    outputs = _load_rows(out, query_row, head, in_block, H, D, WIDE, True)
    row_delta = tl.sum(dout.to(tl.float32) * outputs.to(tl.float32), 1)
    tl.store(delta + query_row * H + head, row_delta, mask=in_block)
    acc = tl.zeros([M, WIDE], tl.float32)
    b, e = tl.load(begin + block), tl.load(end + block)
    full, full_count, before, masked_count = _split_span(
        b, tl.load(full_begin + block), tl.load(full_end + block), e, C
    )
    acc = _query_grad_tiles(
        acc, queries, dout, row_lse, row_delta, k, v, lo, hi, base, head, b, masked_count, before,
        full_count, e, score_scale, weight_scale, H, D, WIDE, ACT, C, PRECISION, True,
    )  # fmt: skip
    acc = _query_grad_tiles(
        acc, queries, dout, row_lse, row_delta, k, v, lo, hi, base, head, full, full_count, 0, 0,
        e, score_scale, weight_scale, H, D, WIDE, ACT, C, PRECISION, False,
    )  # fmt: skip
    _store_rows(dq, query_row, head, in_block, acc * score_scale, H, D, WIDE)


@triton.jit
def _key_grad_tiles(
    dk, dv, keys, values, q, grad, lse, delta, low, high, key, head, begin, count, before,
    full_count, end, score_scale, weight_scale,
    H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, ACT: tl.constexpr, M: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the full tiles of queries, or the masked ones, to the gradients of a block of keys."""
    for i in range(count):
        start = _tile_start(i, begin, before, full_count, M, MASKED)
        query_row = start + tl.arange(0, M)
        in_span = query_row < end
        queries = _load_rows(q, query_row, head, in_span, H, D, WIDE, MASKED)
        dout = _load_rows(grad, query_row, head, in_span, H, D, WIDE, MASKED)
        s = _dot(keys, tl.trans(queries), PRECISION) * score_scale
        dw = _dot(values, tl.trans(dout), PRECISION) * weight_scale
        if MASKED:
            lo = tl.load(low + query_row, mask=in_span, other=0)
            hi = tl.load(high + query_row, mask=in_span, other=0)
            visible = (key[:, None] >= lo[None, :]) & (key[:, None] < hi[None, :])
            s = tl.where(visible, s, 0.0)
        if ACT == 0:
            row_lse = tl.load(lse + query_row * H + head, mask=in_span, other=0.0)
            row_delta = tl.load(delta + query_row * H + head, mask=in_span, other=0.0)
            exponent = s - row_lse[None, :]
            if MASKED:
                exponent = tl.where(visible, exponent, 0.0)
            weights = tl.exp(exponent)
            ds = weights * (dw - row_delta[None, :])
        else:
            weights = _activation(s, ACT)
            ds = _activation_grad(s, ACT) * dw
        if MASKED:
            weights = tl.where(visible, weights, 0.0)
            ds = tl.where(visible, ds, 0.0)
        dv += _dot(weights.to(dout.dtype), dout, PRECISION)
        dk += _dot(ds.to(queries.dtype), queries, PRECISION)
    return dk, dv


@triton.jit
def backward_keys(
    q, k, v, grad, dk, dv, lse, delta, low, high, first, last, keys_start, begin, full_begin,
    full_end, end, score_scale, weight_scale,
    H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, ACT: tl.constexpr,
    PRECISION: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
) -> None:  # fmt: skip
    """Gradients of a block of keys and of their values."""
    block, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(first + block) + tl.arange(0, C)
    in_block = row < tl.load(last + block)
    key = row - tl.load(keys_start + block)
    keys = _load_rows(k, row, head, in_block, H, D, WIDE, True)
    values = _load_rows(v, row, head, in_block, H, D, WIDE, True)
    dk_acc = tl.zeros([C, WIDE], tl.float32)
    dv_acc = tl.zeros([C, WIDE], tl.float32)
    b, e = tl.load(begin + block), tl.load(end + block)
    full, full_count, before, masked_count = _split_span(
        b, tl.load(full_begin + block), tl.load(full_end + block), e, M
    )
    dk_acc, dv_acc = _key_grad_tiles(
        dk_acc, dv_acc, keys, values, q, grad, lse, delta, low, high, key, head, b, masked_count,
        before, full_count, e, score_scale, weight_scale, H, D, WIDE, ACT, M, PRECISION, True,
    )  # fmt: skip
    dk_acc, dv_acc = _key_grad_tiles(
        dk_acc, dv_acc, keys, values, q, grad, lse, delta, low, high, key, head, full, full_count,
        0, 0, e, score_scale, weight_scale, H, D, WIDE, ACT, M, PRECISION, False,
    )  # fmt: skip
    _store_rows(dv, row, head, in_block, dv_acc * weight_scale, H, D, WIDE)
    _store_rows(dk, row, head, in_block, dk_acc * score_scale, H, D, WIDE)
