"""Triton attention gives outputs and gradients of the reference, under Triton's interpreter."""

from collections.abc import Iterator
from dataclasses import fields
from itertools import product
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from training.ops.attention import AttentionKind, reference
from training.ops.attention.reference import Activation
from training.ops.attention.tile_plan import BlockSpans, TilePlan
from training.ops.attention.triton import (
    MAX_TILE_BYTES,
    MIN_TILE_SIDE,
    TUNED,
    AttentionOptions,
    attention,
    outer_rows,
    plan_tiles,
)
from training.ops.attention.triton_kernels import BLOCK_FIELDS

BLOCK, TILE = 16, 16


@pytest.fixture(autouse=True)
def _fill_new_tensors_with_nan() -> Iterator[None]:
    """So that a row that no kernel writes is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


TOLERANCES = {torch.float32: (2e-5, 1e-4), torch.bfloat16: (3e-2, 2e-2)}  # atol, rtol


def offsets_of(counts: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])


def rows(n: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, 2, width).to(dtype).requires_grad_()


def assert_equals_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: tuple[Tensor, Tensor],
    kind: AttentionKind,
    window: int | None = None,
    limits: Tensor | None = None,
) -> None:
    actual = attention(q, k, v, *offsets, kind, window, limits, BLOCK, TILE)
    exact_q, exact_k, exact_v = (x.detach().float().requires_grad_() for x in (q, k, v))
    expected = reference(exact_q, exact_k, exact_v, *offsets, kind, window, limits)
    atol, rtol = TOLERANCES[q.dtype]
    torch.testing.assert_close(actual.float(), expected, atol=atol, rtol=rtol)
    weight = torch.randn_like(expected)
    actual_grads, expected_grads = (
        torch.autograd.grad((out.float() * weight).sum(), inputs, materialize_grads=True)
        for out, inputs in ((actual, (q, k, v)), (expected, (exact_q, exact_k, exact_v)))
    )
    for actual_grad, expected_grad in zip(actual_grads, expected_grads, strict=True):
        torch.testing.assert_close(
            actual_grad.float(), expected_grad, atol=3 * atol, rtol=10 * rtol
        )


@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("limited", [pytest.param(False, marks=pytest.mark.proof), True])
def test_cross_attention_with_and_without_limits_equals_the_reference(
    activation: Activation, limited: bool
) -> None:
    torch.manual_seed(0)
    queries, keys = [3, 0, 18, 1], [20, 4, 33, 0]
    offsets = offsets_of(queries), offsets_of(keys)
    q, k, v = rows(22, 4), rows(57, 4), rows(57, 4)
    keys_of_query = [n for m, n in zip(queries, keys, strict=True) for _ in range(m)]
    limits = torch.tensor([int(torch.randint(n + 1, ())) for n in keys_of_query])
    kind = AttentionKind(activation, weight_scale=0.3)
    assert_equals_reference(q, k, v, offsets, kind, limits=limits if limited else None)


@pytest.mark.parametrize(
    ("activation", "window", "width"),
    [
        *product(get_args(Activation), (8,), (4,)),
        ("softmax", 5, 16),
        ("silu", 40, 20),
        *(pytest.param(name, None, 4, marks=pytest.mark.proof) for name in get_args(Activation)),
    ],
)
def test_causal_attention_with_and_without_a_window_equals_the_reference(
    activation: Activation, window: int | None, width: int
) -> None:
    torch.manual_seed(1)
    counts = [37, 0, 1, 16]
    offsets = offsets_of(counts), offsets_of(counts)
    q, k, v = (rows(sum(counts), width) for _ in range(3))
    kind = AttentionKind(activation, causal=True, score_scale=0.5)
    assert_equals_reference(q, k, v, offsets, kind, window=window)


def test_attention_without_queries_is_empty() -> None:
    offsets = offsets_of([0, 0]), offsets_of([0, 3])
    out = attention(
        rows(0, 4), rows(3, 4), rows(3, 4), *offsets, AttentionKind(), None, None, 16, 16
    )
    assert out.shape == (0, 2, 4)


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_or_limits_beyond_all_keys_are_as_none(causal: bool) -> None:
    """However large they are: plans have 32 bits."""
    torch.manual_seed(4)
    offsets = offsets_of([5, 19]), offsets_of([5, 19])
    q, k, v = rows(24, 4), rows(24, 4), rows(24, 4)
    kind = AttentionKind(causal=causal)
    expected = attention(q, k, v, *offsets, kind, None, None, BLOCK, TILE)
    for most in (24, 2**31 - 1, 2**31, 2**40):
        window, limits = (most, None) if causal else (None, torch.full((24,), most))
        actual = attention(q, k, v, *offsets, kind, window, limits, BLOCK, TILE)
        torch.testing.assert_close(actual, expected)


def test_second_derivatives_are_refused() -> None:
    offsets = offsets_of([5]), offsets_of([5])
    q, k, v = rows(5, 4), rows(5, 4), rows(5, 4)
    out = attention(q, k, v, *offsets, AttentionKind(), None, None, BLOCK, TILE)
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_kernels_read_the_fields_that_plans_have() -> None:
    assert len(fields(BlockSpans)) == BLOCK_FIELDS.value


def test_a_compiler_calls_attention_as_one_operator() -> None:
    """With `fullgraph` a return to Python is an error."""
    torch.manual_seed(3)
    offsets = offsets_of([5, 0, 19])

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kind = AttentionKind(causal=True)
        return attention(q, k, v, offsets, offsets, kind, 4, None, BLOCK, TILE).square().sum()

    torch.compiler.reset()
    inputs = [rows(24, 4) for _ in range(3)]
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    eager_grads, compiled_grads = (
        torch.autograd.grad(function(*inputs), inputs) for function in (loss, compiled)
    )
    torch.testing.assert_close(compiled_grads, eager_grads)
    torch.compiler.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("activation", "window", "width"),
    [("softmax", None, 64), ("silu", 34, 64), ("softmax", 34, 128)],
)
def test_wide_heads_in_both_precisions_equal_the_reference(
    activation: Activation, window: int | None, width: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(2)
    counts = [40, 3]  # some tiles are full
    offsets = offsets_of(counts), offsets_of(counts)
    q, k, v = (rows(sum(counts), width, dtype) for _ in range(3))
    kind = AttentionKind(activation, causal=True, weight_scale=0.5)
    assert_equals_reference(q, k, v, offsets, kind, window=window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [4, 16, 32, 64, 128, 256])
def test_tiles_of_any_width_and_type_fit_in_shared_memory(width: int, dtype: torch.dtype) -> None:
    q, wide = rows(1, width, dtype), max(width, MIN_TILE_SIDE)
    for kernel in TUNED.values():
        configs = kernel.early_config_prune(kernel.configs, {"q": q}, WIDE=wide)
        sizes = [outer_rows(q), *(size for c in configs for size in c.kwargs.values())]
        most = max(MAX_TILE_BYTES // (wide * q.element_size()), MIN_TILE_SIDE)
        assert configs and min(sizes) >= MIN_TILE_SIDE and max(sizes) <= most


def test_layers_with_the_same_offsets_and_window_share_a_plan() -> None:
    offsets, q = offsets_of([5, 3]), rows(8, 4)

    def plan(offsets: Tensor, window: int | None) -> TilePlan:
        options = AttentionOptions("softmax", True, 1.0, 1.0, window, BLOCK, TILE)
        return plan_tiles(q, q, offsets, offsets, None, options)

    first = plan(offsets, 4)
    assert plan(offsets, 4) is first
    assert plan(offsets, 2) is not first and plan(offsets.clone(), 4) is not first
    offsets[1] = 4
    assert plan(offsets, 4) is not first


@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_backward_pass_uses_the_plan_of_the_forward_pass(
    monkeypatch: pytest.MonkeyPatch, is_compiled: bool
) -> None:
    """Also with keys of their own and limits, where the tiles of the keys are planned too."""
    built: list[TilePlan] = []
    build = TilePlan.build

    def counted(*args: Any) -> TilePlan:
        built.append(build(*args))
        return built[-1]

    monkeypatch.setattr(TilePlan, "build", counted)
    offsets, limits = (offsets_of([3, 4]), offsets_of([5, 2])), torch.tensor([5, 1, 2, 0, 1, 2, 2])

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, *offsets, AttentionKind(), None, limits, BLOCK, TILE).sum()

    torch.compiler.reset()
    function = torch.compile(loss, fullgraph=True, backend="aot_eager") if is_compiled else loss
    inputs = [rows(7, 4) for _ in range(3)]
    torch.autograd.grad(function(*inputs), inputs)
    assert len(built) == 1
    torch.compiler.reset()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=4),
    st.sampled_from(["causal", "window", "all", "limits"]),
    st.integers(1, 30),
    st.integers(4, 20),
)
def test_blocks_cover_exactly_the_pairs_that_attend(
    sizes: list[tuple[int, int]], mask: str, window: int, block: int
) -> None:
    """Each row is in one block; spans hold all its pairs, and their full part only such pairs."""
    causal = mask in ("causal", "window")
    queries = [m for m, _ in sizes]
    keys = queries if causal else [n for _, n in sizes]
    q_offsets, kv_offsets = offsets_of(queries), offsets_of(keys)
    most = [n for m, n in zip(queries, keys, strict=True) for _ in range(m)]
    limits = torch.tensor([(7 * i) % (n + 1) for i, n in enumerate(most)], dtype=torch.int64)
    plan = TilePlan.build(
        (sum(queries), sum(keys)),
        (q_offsets, kv_offsets),
        causal,
        window if mask == "window" else None,
        limits if mask == "limits" else None,
        (block, block),
    )
    attends = torch.zeros(sum(queries), sum(keys), dtype=torch.bool)
    for query in range(sum(queries)):
        start = int(kv_offsets[torch.searchsorted(q_offsets[1:], query, right=True)])
        attends[query, start + int(plan.low[query]) : start + int(plan.high[query])] = True
    for spans, pairs, is_key in ((plan.queries, attends, False), (plan.keys, attends.T, True)):
        rows_seen: list[int] = []
        for first, last, base, begin, full_begin, full_end, end in spans.tolist():
            rows_seen += range(first, last)
            shift = 0 if is_key else base
            others = torch.arange(pairs.shape[1])
            outside = (others < begin + shift) | (others >= end + shift)
            assert not pairs[first:last][:, outside].any()
            full = slice(max(full_begin, begin) + shift, min(full_end, end) + shift)
            assert pairs[first:last, full].all()
        assert rows_seen == list(range(pairs.shape[0]))
