"""Ragged attention on a GPU: its kernels tuned, launched and differentiated.

N positions, H heads, D width of a head.
"""

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef

from training.ops.attention.reference import SOFTMAX, AttentionKind
from training.ops.attention.tile_plan import TilePlan
from training.ops.attention.triton_kernels import (
    ACTIVATION_CODES,
    backward_keys,
    backward_queries,
    forward,
)

MIN_TILE_SIDE = 16  # smallest side of a matrix product on tensor cores
MAX_OUTER_ROWS = 64
MAX_TILE_BYTES = 16_384  # several tiles share the shared memory of a multiprocessor
TUNED_BY = ["H", "D", "ACT", "PRECISION"]  # and by the types of the tensors
INNER_TILES = ((16, 2), (32, 3), (64, 3), (128, 2))  # rows and pipeline stages


def padded_width(q: Tensor) -> int:
    """The width of a head in a tile: the next power of two."""
    return max(MIN_TILE_SIDE, int(triton.next_power_of_2(q.shape[-1])))


def max_tile_rows(q: Tensor) -> int:
    """The most rows of a tile that fit in shared memory."""
    return max(MAX_TILE_BYTES // (padded_width(q) * q.element_size()), MIN_TILE_SIDE)


def _fitting_configs(
    configs: list[triton.Config], arguments: Mapping[str, Any], **_: Any
) -> list[triton.Config]:
    """The configurations with the three largest inner tiles that fit in shared memory."""
    max_rows = max_tile_rows(arguments["q"])
    return [config for config in configs if max(config.kwargs.values()) <= max_rows][-3:]


def _tuned(kernel: Any, inner: str) -> Any:
    """A kernel that tries sizes of the inner side of its tiles once per shape and machine."""
    configs = [
        triton.Config({inner: rows}, num_warps=4, num_stages=stages) for rows, stages in INNER_TILES
    ]
    return triton.autotune(
        configs,
        key=TUNED_BY,
        prune_configs_by={"early_config_prune": _fitting_configs},
        cache_results=True,
    )(kernel)


# The outer side of a tile is given by the plan, the inner one is tuned.
TUNED: Mapping[Any, Any] = {
    forward: _tuned(forward, "C"),
    backward_queries: _tuned(backward_queries, "C"),
    backward_keys: _tuned(backward_keys, "M"),
}


def _launch(
    kernel: Any, grid: tuple[int, int], outer: str, block: int, tile: int | None,
    args: tuple[Any, ...], meta: dict[str, Any],
) -> None:  # fmt: skip
    """Run a kernel on blocks of `block` rows; the inner side is `tile` rows, tuned by default."""
    if not grid[0]:
        return
    if tile is None:
        TUNED[kernel][grid](*args, **meta, **{outer: block})
    else:
        kernel[grid](*args, **meta, **{outer: block, "C" if outer == "M" else "M": tile})


class AttentionOptions(NamedTuple):
    """How queries attend, and the rows of the outer and, if given, the inner side of a tile."""

    activation: str
    causal: bool
    score_scale: float
    weight_scale: float
    window: int | None
    block: int
    tile: int | None


def _attend(
    q: Tensor, k: Tensor, v: Tensor, plan: TilePlan, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Attended values (N, H, D), and the binary logarithms of the sums of weights (H, N)."""
    out, lse = torch.empty_like(q), q.new_empty(_lse_shape(q), dtype=torch.float32)
    scales = options.score_scale, options.weight_scale
    args = q, k, v, out, lse, plan.low, plan.high, plan.queries, len(q), *scales
    grid = len(plan.queries), q.shape[1]
    _launch(forward, grid, "M", options.block, options.tile, args, _meta(q, options.activation))
    return out, lse


def _differentiate(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, plan: TilePlan,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys and values."""
    delta = torch.empty_like(lse)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    rows = lse, delta, plan.low, plan.high
    scales = options.score_scale, options.weight_scale
    tiles = options.block, options.tile
    heads, meta = q.shape[1], _meta(q, options.activation)
    args = q, k, v, out, grad, dq, *rows, plan.queries, len(q), *scales
    _launch(backward_queries, (len(plan.queries), heads), "M", *tiles, args, meta)
    args = q, k, v, grad, dk, dv, *rows, plan.keys, len(q), *scales
    _launch(backward_keys, (len(plan.keys), heads), "C", *tiles, args, meta)
    return dq, dk, dv


def _lse_shape(q: Tensor) -> tuple[int, int]:
    """(H, N): a block of queries of a head is contiguous."""
    return q.shape[1], q.shape[0]


class TritonAttention(torch.autograd.Function):
    """Attention by tiles of a plan. It costs the host less than an operator."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: TilePlan, options: AttentionOptions
    ) -> Tensor:
        """Attended values (N, H, D)."""
        out, lse = _attend(q, k, v, plan, options)
        ctx.save_for_backward(out, lse, q, k, v)
        ctx.plan, ctx.options = plan, options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of queries, keys and values."""
        out, lse, q, k, v = ctx.saved_tensors
        gradients = _differentiate(grad.contiguous(), out, lse, q, k, v, ctx.plan, ctx.options)
        return *gradients, None, None


# Compilers keep compiled graphs on disk by the names of operators: an operator whose outputs get
# other shapes needs another name.
@torch.library.custom_op("gemline::ragged_attention", mutates_args=())
def _operator(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, limits: Tensor | None,
    activation: str, causal: bool, score_scale: float, weight_scale: float, window: int | None,
    block: int, tile: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`_attend` as an operator that a compiler calls, but does not look into."""
    options = AttentionOptions(activation, causal, score_scale, weight_scale, window, block, tile)
    return _attend(q, k, v, plan_tiles(q, k, q_offsets, kv_offsets, limits, options), options)


@_operator.register_fake
def _attention_shapes(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(_lse_shape(q), dtype=torch.float32)


@torch.library.custom_op("gemline::ragged_attention_backward", mutates_args=())
def _backward_operator(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor,
    kv_offsets: Tensor, limits: Tensor | None, activation: str, causal: bool, score_scale: float,
    weight_scale: float, window: int | None, block: int, tile: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`_differentiate` as an operator."""
    options = AttentionOptions(activation, causal, score_scale, weight_scale, window, block, tile)
    plan = plan_tiles(q, k, q_offsets, kv_offsets, limits, options)
    return _differentiate(grad, out, lse, q, k, v, plan, options)


@_backward_operator.register_fake
def _gradient_shapes(
    _grad: Tensor, _out: Tensor, _lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.options = inputs[:6], inputs[6:]
    ctx.save_for_backward(*output, *tensors)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _backward_operator(grad.contiguous(), *ctx.saved_tensors, *ctx.options)
    return *gradients, *[None] * (len(ctx.needs_input_grad) - 3)


_operator.register_autograd(_backward, setup_context=_keep_for_backward)


def _meta(q: Tensor, activation: str) -> dict[str, Any]:
    """The constants for which a kernel is compiled."""
    return {
        "H": q.shape[1], "D": q.shape[2], "WIDE": padded_width(q),
        "ACT": ACTIVATION_CODES[activation], "PRECISION": product_precision(q),
    }  # fmt: skip


def product_precision(q: Tensor) -> str:
    """How matrix products are computed: those of fp32 in TF32 if PyTorch may use it for its own.

    Triton's interpreter, which works on a CPU, has no bf16 products: there operands are widened,
    which gives the same result, since a product of two bf16 numbers is exact in fp32.
    """
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        return "widened"
    if q.dtype != torch.float32:
        return "ieee"
    may_use_tf32 = torch.get_float32_matmul_precision() != "highest"
    return "tf32" if may_use_tf32 else "tf32x3"


def outer_rows(q: Tensor) -> int:
    """Rows of the outer side of a tile: as many as fit, at most MAX_OUTER_ROWS."""
    return min(max_tile_rows(q), MAX_OUTER_ROWS)


# Plans by the offsets of queries: layers share them, and so do forward and backward pass.
_PLANS: MutableMapping[Tensor, dict[tuple[Any, ...], TilePlan]] = WeakIdKeyDictionary()


def plan_tiles(
    q: Tensor,
    k: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    limits: Tensor | None,
    options: AttentionOptions,
) -> TilePlan:
    """The tiles of attention, which are planned once for the same offsets and limits."""
    plans = _PLANS.setdefault(q_offsets, {})
    tensors = [x for x in (q_offsets, kv_offsets, limits) if x is not None]
    identities = tuple((WeakIdRef(x), x._version) for x in tensors)
    causal, window, block = options.causal, options.window, options.block
    key = identities, len(q), len(k), causal, window, block
    if key not in plans:
        plans[key] = TilePlan.build(
            (len(q), len(k)), (q_offsets, kv_offsets), causal, window, limits, (block, block)
        )
    return plans[key]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    kind: AttentionKind = SOFTMAX,
    window: int | None = None,
    limits: Tensor | None = None,
    block_size: int | None = None,
    tile_size: int | None = None,
) -> Tensor:
    """Attention on a GPU.

    Args and result are those of `training.ops.attention.reference.attention`. `block_size` and
    `tile_size` are the rows of the outer and the inner side of a tile; by default the first depends
    on the width, and the second is tuned.
    """
    options = AttentionOptions(
        kind.activation, kind.causal, kind.resolve_score_scale(q.shape[-1]), kind.weight_scale,
        window, block_size or outer_rows(q), tile_size,
    )  # fmt: skip
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    if torch.compiler.is_compiling():
        out: Tensor = _operator(q, k, v, q_offsets, kv_offsets, limits, *options)[0]
        return out
    apply: Callable[..., Tensor] = TritonAttention.apply
    return apply(q, k, v, plan_tiles(q, k, q_offsets, kv_offsets, limits, options), options)
