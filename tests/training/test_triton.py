"""The GPU's attention is the reference, under Triton's interpreter: forward and backward."""

from itertools import product
from typing import get_args

import pytest
import torch
from torch import Tensor

from training.ops.attention import Kind, reference
from training.ops.attention.kinds import Activation
from training.ops.attention.triton import attention

BLOCK = 16


def offsets(counts: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])


def rows(n: int, width: int) -> Tensor:
    return torch.randn(n, 2, width, requires_grad=True)


def agree(q: Tensor, k: Tensor, v: Tensor, cuts: tuple[Tensor, Tensor], kind: Kind, **more) -> None:
    got = attention(q, k, v, *cuts, kind, block=BLOCK, **more)
    wanted = reference(q, k, v, *cuts, kind, **more)
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)
    weight = torch.randn_like(wanted)
    found, told = (
        torch.autograd.grad((out * weight).sum(), (q, k, v), materialize_grads=True)
        for out in (got, wanted)
    )
    for a, b in zip(found, told, strict=True):
        torch.testing.assert_close(a, b, atol=5e-5, rtol=1e-3)


@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("limited", [False, True])
def test_queries_of_one_side_and_keys_of_another(activation: Activation, limited: bool) -> None:
    torch.manual_seed(0)
    queries, keys = [3, 0, 18, 1], [20, 4, 33, 0]
    cuts = offsets(queries), offsets(keys)
    q, k, v = rows(22, 4), rows(57, 4), rows(57, 4)
    seen = [n for m, n in zip(queries, keys, strict=True) for _ in range(m)]
    limits = torch.tensor([int(torch.randint(n + 1, ())) for n in seen])
    agree(q, k, v, cuts, Kind(activation, outside=0.3), limits=limits if limited else None)


@pytest.mark.parametrize(
    ("activation", "window", "width"),
    [*product(get_args(Activation), (None, 8), (4,)), ("softmax", 5, 16), ("silu", 40, 20)],
)
def test_each_position_sees_those_before_it(
    activation: Activation, window: int | None, width: int
) -> None:
    torch.manual_seed(1)
    counts = [37, 0, 1, 16]
    cuts = (offsets(counts),) * 2
    q, k, v = (rows(sum(counts), width) for _ in range(3))
    agree(q, k, v, cuts, Kind(activation, causal=True, inside=0.5), window=window)


def test_nothing_is_nothing() -> None:
    cuts = offsets([0, 0]), offsets([0, 3])
    found = attention(rows(0, 4), rows(3, 4), rows(3, 4), *cuts, Kind())
    assert found.shape == (0, 2, 4)
