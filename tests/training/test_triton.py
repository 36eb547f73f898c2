"""Triton attention gives outputs and gradients of the reference, under Triton's interpreter."""

from itertools import product
from typing import get_args

import pytest
import torch
from torch import Tensor

from training.ops.attention import AttentionKind, reference
from training.ops.attention.reference import Activation
from training.ops.attention.triton import attention

BLOCK = 16


def offsets_of(counts: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])


def rows(n: int, width: int) -> Tensor:
    return torch.randn(n, 2, width, requires_grad=True)


def assert_equals_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: tuple[Tensor, Tensor],
    kind: AttentionKind,
    window: int | None = None,
    limits: Tensor | None = None,
) -> None:
    actual = attention(q, k, v, *offsets, kind, window, limits, block_size=BLOCK)
    expected = reference(q, k, v, *offsets, kind, window, limits)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)
    weight = torch.randn_like(expected)
    actual_grads, expected_grads = (
        torch.autograd.grad((out * weight).sum(), (q, k, v), materialize_grads=True)
        for out in (actual, expected)
    )
    torch.testing.assert_close(actual_grads, expected_grads, atol=5e-5, rtol=1e-3)


@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("limited", [False, True])
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
    [*product(get_args(Activation), (None, 8), (4,)), ("softmax", 5, 16), ("silu", 40, 20)],
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
    out = attention(rows(0, 4), rows(3, 4), rows(3, 4), *offsets, AttentionKind())
    assert out.shape == (0, 2, 4)
