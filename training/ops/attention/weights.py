"""Scores to weights and back, by hand: what the fast paths do between their products.

Scores and weights are (…, queries, keys). The last keys of a causal rectangle are its queries.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from training.ops.attention.kinds import Kind
from training.ops.attention.reference import ELEMENTWISE

aten = torch.ops.aten
DERIVED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": aten.silu_backward,
    "gelu": aten.gelu_backward,
    "relu": lambda grad, scores: aten.threshold_backward(grad, scores, 0),
    "identity": lambda grad, scores: grad.clone(),
}


@lru_cache(maxsize=64)
def _seen(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """1 where a query sees a key of its own square, 0 where the key is later."""
    return torch.ones(n, n, dtype=dtype, device=device).tril_()


@lru_cache(maxsize=64)
def _later(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _seen(n, dtype, device).log()


def hide_later(scores: Tensor, kind: Kind) -> None:
    """Take out, in place, the keys that come after a query in the square at the end."""
    n = scores.shape[-2]
    square = scores[..., -n:]
    if kind.activation == "softmax":
        square.add_(_later(n, scores.dtype, scores.device))
    else:
        square.mul_(_seen(n, scores.dtype, scores.device))


def weigh(scores: Tensor, kind: Kind) -> tuple[Tensor, Tensor | None]:
    """Weights, and the scores where the backward pass needs them."""
    if kind.activation == "softmax":
        return scores.softmax(-1), None
    return ELEMENTWISE[kind.activation](scores), scores


def weigh_backward(grad: Tensor, weights: Tensor, scores: Tensor | None, kind: Kind) -> Tensor:
    """Gradient of the scores from that of the weights; hidden keys get none."""
    if scores is None:
        return aten._softmax_backward_data(grad, weights, -1, weights.dtype)
    found = DERIVED[kind.activation](grad, scores)
    if kind.causal:
        n = found.shape[-2]
        found[..., -n:].mul_(_seen(n, found.dtype, found.device))
    return found
