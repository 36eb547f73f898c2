"""Triton kernels of ragged attention: forward, and gradients of queries, of keys and values.

One program handles a head and a block of queries (of keys for the gradients of keys and values);
scores stay in registers. The keys that a query attends to are a span [low, high) of its sequence,
so causal, windowed and limited attention are the same kernel. Tiles in which all pairs attend are
computed without a mask. Products accumulate in fp32. H heads, D width of a head, WIDE the power of
two above it, M queries and C keys of a tile, ACT the code of an activation.
"""

import triton
import triton.language as tl

BLOCK_FIELDS = tl.constexpr(7)  # of a row of `BlockSpans.pack`, in its order
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
def _loop_scale(score_scale, ACT: tl.constexpr):
    """The scale of scores in loops: softmax uses exp2, which is faster, with log2(e) in it."""
    if ACT == 0:
        score_scale = score_scale * 1.4426950408889634
    return score_scale


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    """The product of two tiles, accumulated in fp32."""
    if PRECISION == "widened":
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        product = tl.dot(a, b, input_precision=PRECISION)
    return product


@triton.jit
def _tile_pointers(
    x, row, head, ROWS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr
):
    """Pointers (ROWS, WIDE) to consecutive rows of a head: 64 bits at the first, then 32."""
    offsets = tl.arange(0, ROWS)[:, None] * (H * D) + tl.arange(0, WIDE)[None, :]
    return x + (row.to(tl.int64) * (H * D) + head * D) + offsets


@triton.jit
def _tile_mask(rows, ROWS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr):
    """Which elements of a tile are among its first `rows` rows, and within a head."""
    return (tl.arange(0, ROWS) < rows)[:, None] & (tl.arange(0, WIDE) < D)[None, :]


@triton.jit
def _load_tile(
    x, row, rows, head, ROWS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Load ROWS rows of one head; zeros beyond D and, if masked, from the row `rows` on."""
    pointers = _tile_pointers(x, row, head, ROWS, H, D, WIDE)
    if MASKED:
        value = tl.load(pointers, mask=_tile_mask(rows, ROWS, D, WIDE), other=0.0)
    elif D == WIDE:
        value = tl.load(pointers)
    else:
        value = tl.load(pointers, mask=_tile_mask(ROWS, ROWS, D, WIDE), other=0.0)
    return value


@triton.jit
def _store_tile(
    x, row, rows, head, value, ROWS: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Store the first `rows` rows of a tile."""
    pointers = _tile_pointers(x, row, head, ROWS, H, D, WIDE)
    tl.store(pointers, value.to(x.dtype.element_ty), mask=_tile_mask(rows, ROWS, D, WIDE))


@triton.jit
def _load_block(blocks, block):
    """The first row of a block, its number of rows, and the first key of its sequence."""
    fields = blocks + block * BLOCK_FIELDS
    first = tl.load(fields)
    return first, tl.load(fields + 1) - first, tl.load(fields + 2)


@triton.jit
def _split_span(blocks, block, TILE: tl.constexpr):
    """Split the span of a block into full tiles and masked tiles before and after them.

    Returns the span, the first row of the full tiles, their number, and the numbers of masked tiles
    before them and in total.
    """
    fields = blocks + block * BLOCK_FIELDS
    begin, full_begin = tl.load(fields + 3), tl.load(fields + 4)
    full_end, end = tl.load(fields + 5), tl.load(fields + 6)
    before = tl.cdiv(tl.maximum(full_begin - begin, 0), TILE)
    full = begin + before * TILE
    full_count = tl.maximum(tl.minimum(full_end, end) - full, 0) // TILE
    before = tl.where(full_count > 0, before, 0)
    full = begin + before * TILE
    after = tl.cdiv(tl.maximum(end - full - full_count * TILE, 0), TILE)
    return begin, end, full, full_count, before, before + after


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
    full_count, end, scale,
    H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, ACT: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the full tiles of keys, or the masked ones, to the sums of a block of queries."""
    for i in range(count):
        start = _tile_start(i, begin, before, full_count, C, MASKED)
        key = start + tl.arange(0, C)
        keys = _load_tile(k, base + start, end - start, head, C, H, D, WIDE, MASKED)
        values = _load_tile(v, base + start, end - start, head, C, H, D, WIDE, MASKED)
        s = _dot(queries, tl.trans(keys), PRECISION) * scale
        if MASKED:
            visible = (key[None, :] >= lo[:, None]) & (key[None, :] < hi[:, None])
            visible = visible & (key < end)[None, :]
        if ACT == 0:
            if MASKED:
                s = tl.where(visible, s, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(s, 1))
            safe_max = new_max
            if MASKED:
                safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
            weights = tl.exp2(s - safe_max[:, None])
            rescale = tl.exp2(row_max - safe_max)
            total = total * rescale + tl.sum(weights, 1)
            acc = acc * rescale[:, None]
            row_max = new_max
        else:
            weights = _activation(s, ACT)
            if MASKED:
                weights = tl.where(visible, weights, 0.0)
        acc += _dot(weights.to(values.dtype), values, PRECISION)
    return acc, row_max, total


@triton.jit(do_not_specialize=["query_count"])
def forward(
    q, k, v, out, lse, low, high, blocks, query_count, score_scale, weight_scale,
    H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, ACT: tl.constexpr,
    PRECISION: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
) -> None:  # fmt: skip
    """Attention of a block of queries to the keys of its span."""
    block, head = tl.program_id(0), tl.program_id(1)
    lse += head.to(tl.int64) * query_count
    first_row, rows, base = _load_block(blocks, block)
    query_row = first_row + tl.arange(0, M)
    in_block = tl.arange(0, M) < rows
    lo = tl.load(low + query_row, mask=in_block, other=0)
    hi = tl.load(high + query_row, mask=in_block, other=0)
    queries = _load_tile(q, first_row, rows, head, M, H, D, WIDE, True)
    acc = tl.zeros([M, WIDE], tl.float32)
    scale = _loop_scale(score_scale, ACT)
    row_max = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    b, e, full, full_count, before, masked_count = _split_span(blocks, block, C)
    acc, row_max, total = _forward_tiles(
        acc, row_max, total, queries, k, v, lo, hi, base, head, b, masked_count, before,
        full_count, e, scale, H, D, WIDE, ACT, C, PRECISION, True,
    )  # fmt: skip
    acc, row_max, total = _forward_tiles(
        acc, row_max, total, queries, k, v, lo, hi, base, head, full, full_count, 0, 0, e,
        scale, H, D, WIDE, ACT, C, PRECISION, False,
    )  # fmt: skip
    if ACT == 0:
        denominator = tl.where(total > 0, total, 1.0)
        acc = acc / denominator[:, None]
        row_lse = row_max + tl.log2(denominator)
        tl.store(lse + query_row, row_lse, mask=in_block)
    _store_tile(out, first_row, rows, head, acc * weight_scale, M, H, D, WIDE)


@triton.jit
def _query_grad_tiles(
    acc, queries, dout, row_lse, row_delta, k, v, lo, hi, base, head, begin, count, before,
    full_count, end, scale, weight_scale,
    H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, ACT: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the full tiles of keys, or the masked ones, to the gradients of a block of queries."""
    for i in range(count):
        start = _tile_start(i, begin, before, full_count, C, MASKED)
        key = start + tl.arange(0, C)
        keys = _load_tile(k, base + start, end - start, head, C, H, D, WIDE, MASKED)
        values = _load_tile(v, base + start, end - start, head, C, H, D, WIDE, MASKED)
        s = _dot(queries, tl.trans(keys), PRECISION) * scale
        dw = _dot(dout, tl.trans(values), PRECISION) * weight_scale
        if MASKED:
            visible = (key[None, :] >= lo[:, None]) & (key[None, :] < hi[:, None])
            visible = visible & (key < end)[None, :]
            s = tl.where(visible, s, 0.0)
        if ACT == 0:
            exponent = s - row_lse[:, None]
            if MASKED:
                exponent = tl.where(visible, exponent, 0.0)
            ds = tl.exp2(exponent) * (dw - row_delta[:, None])
        else:
            ds = _activation_grad(s, ACT) * dw
        if MASKED:
            ds = tl.where(visible, ds, 0.0)
        acc += _dot(ds.to(keys.dtype), keys, PRECISION)
    return acc


@triton.jit(do_not_specialize=["query_count"])
def backward_queries(
    q, k, v, out, grad, dq, lse, delta, low, high, blocks, query_count, score_scale, weight_scale,
    H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, ACT: tl.constexpr,
    PRECISION: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
) -> None:  # fmt: skip
    """Gradients of a block of queries, and `delta`: the products of outputs and their gradients."""
    block, head = tl.program_id(0), tl.program_id(1)
    lse += head.to(tl.int64) * query_count
    delta += head.to(tl.int64) * query_count
    first_row, rows, base = _load_block(blocks, block)
    query_row = first_row + tl.arange(0, M)
    in_block = tl.arange(0, M) < rows
    lo = tl.load(low + query_row, mask=in_block, other=0)
    hi = tl.load(high + query_row, mask=in_block, other=0)
    queries = _load_tile(q, first_row, rows, head, M, H, D, WIDE, True)
    dout = _load_tile(grad, first_row, rows, head, M, H, D, WIDE, True)
    outputs = _load_tile(out, first_row, rows, head, M, H, D, WIDE, True)
    row_lse = tl.load(lse + query_row, mask=in_block, other=0.0)
    scale = _loop_scale(score_scale, ACT)
    row_delta = tl.sum(dout.to(tl.float32) * outputs.to(tl.float32), 1)
    tl.store(delta + query_row, row_delta, mask=in_block)
    acc = tl.zeros([M, WIDE], tl.float32)
    b, e, full, full_count, before, masked_count = _split_span(blocks, block, C)
    acc = _query_grad_tiles(
        acc, queries, dout, row_lse, row_delta, k, v, lo, hi, base, head, b, masked_count, before,
        full_count, e, scale, weight_scale, H, D, WIDE, ACT, C, PRECISION, True,
    )  # fmt: skip
    acc = _query_grad_tiles(
        acc, queries, dout, row_lse, row_delta, k, v, lo, hi, base, head, full, full_count, 0, 0,
        e, scale, weight_scale, H, D, WIDE, ACT, C, PRECISION, False,
    )  # fmt: skip
    _store_tile(dq, first_row, rows, head, acc * score_scale, M, H, D, WIDE)


@triton.jit
def _key_grad_tiles(
    dk, dv, keys, values, q, grad, lse, delta, low, high, key, head, begin, count, before,
    full_count, end, scale, weight_scale,
    H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, ACT: tl.constexpr, M: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the full tiles of queries, or the masked ones, to the gradients of a block of keys."""
    for i in range(count):
        start = _tile_start(i, begin, before, full_count, M, MASKED)
        query_row = start + tl.arange(0, M)
        in_span = query_row < end
        queries = _load_tile(q, start, end - start, head, M, H, D, WIDE, MASKED)
        dout = _load_tile(grad, start, end - start, head, M, H, D, WIDE, MASKED)
        s = _dot(keys, tl.trans(queries), PRECISION) * scale
        dw = _dot(values, tl.trans(dout), PRECISION) * weight_scale
        if MASKED:
            lo = tl.load(low + query_row, mask=in_span, other=0)
            hi = tl.load(high + query_row, mask=in_span, other=0)
            visible = (key[:, None] >= lo[None, :]) & (key[:, None] < hi[None, :])
            s = tl.where(visible, s, 0.0)
        if ACT == 0:
            if MASKED:
                row_lse = tl.load(lse + query_row, mask=in_span, other=0.0)
                row_delta = tl.load(delta + query_row, mask=in_span, other=0.0)
            else:
                row_lse, row_delta = tl.load(lse + query_row), tl.load(delta + query_row)
            exponent = s - row_lse[None, :]
            if MASKED:
                exponent = tl.where(visible, exponent, 0.0)
            weights = tl.exp2(exponent)
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


@triton.jit(do_not_specialize=["query_count"])
def backward_keys(
    q, k, v, grad, dk, dv, lse, delta, low, high, blocks, query_count, score_scale, weight_scale,
    H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, ACT: tl.constexpr,
    PRECISION: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
) -> None:  # fmt: skip
    """Gradients of a block of keys and of their values."""
    block, head = tl.program_id(0), tl.program_id(1)
    lse += head.to(tl.int64) * query_count
    delta += head.to(tl.int64) * query_count
    first_row, rows, base = _load_block(blocks, block)
    key = first_row - base + tl.arange(0, C)
    keys = _load_tile(k, first_row, rows, head, C, H, D, WIDE, True)
    values = _load_tile(v, first_row, rows, head, C, H, D, WIDE, True)
    scale = _loop_scale(score_scale, ACT)
    dk_acc = tl.zeros([C, WIDE], tl.float32)
    dv_acc = tl.zeros([C, WIDE], tl.float32)
    b, e, full, full_count, before, masked_count = _split_span(blocks, block, M)
    dk_acc, dv_acc = _key_grad_tiles(
        dk_acc, dv_acc, keys, values, q, grad, lse, delta, low, high, key, head, b, masked_count,
        before, full_count, e, scale, weight_scale, H, D, WIDE, ACT, M, PRECISION, True,
    )  # fmt: skip
    dk_acc, dv_acc = _key_grad_tiles(
        dk_acc, dv_acc, keys, values, q, grad, lse, delta, low, high, key, head, full, full_count,
        0, 0, e, scale, weight_scale, H, D, WIDE, ACT, M, PRECISION, False,
    )  # fmt: skip
    _store_tile(dv, first_row, rows, head, dv_acc * weight_scale, C, H, D, WIDE)
    _store_tile(dk, first_row, rows, head, dk_acc * score_scale, C, H, D, WIDE)
