"""Scores to weights and back, by hand: what the fast paths do between their products.

Scores and weights are (…, n queries, keys).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

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


@dataclass(frozen=True)
class Corner:
    """Which of the last c keys each query sees, as `seen` (n, c) of 1 and 0; it sees all others."""

    seen: Tensor

    def of(self, x: Tensor) -> Tensor:
        """The last c columns of scores or weights."""
        return x[..., x.shape[-1] - self.seen.shape[1] :]

    @cached_property
    def hidden(self) -> Tensor:
        """What is added to scores before a softmax: 0 and minus infinity."""
        return self.seen.log()

    @cached_property
    def blind(self) -> bool:
        """Whether some query sees none of these keys."""
        return not bool(self.seen.any(1).all())


@lru_cache(maxsize=64)
def square(n: int, dtype: torch.dtype, device: torch.device) -> Corner:
    """Each query sees itself and what came before."""
    return Corner(torch.ones(n, n, dtype=dtype, device=device).tril_())


def weigh(scores: Tensor, corner: Corner | None, kind: Kind) -> tuple[Tensor, Tensor | None]:
    """Weights, and the scores where the backward pass needs them; `scores` are changed."""
    softmax = kind.activation == "softmax"
    if corner:
        part = corner.of(scores)
        part.add_(corner.hidden) if softmax else part.mul_(corner.seen)
    if not softmax:
        return ELEMENTWISE[kind.activation](scores), scores
    weights = scores.softmax(-1)
    return (weights.nan_to_num_(0.0) if corner and corner.blind else weights), None


def weigh_backward(
    grad: Tensor, weights: Tensor, scores: Tensor | None, corner: Corner | None, kind: Kind
) -> Tensor:
    """Gradient of the scores from that of the weights; hidden keys get none."""
    if scores is None:
        return aten._softmax_backward_data(grad, weights, -1, weights.dtype)
    found = DERIVED[kind.activation](grad, scores)
    if corner:
        corner.of(found).mul_(corner.seen)
    return found
