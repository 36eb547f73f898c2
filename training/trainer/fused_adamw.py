"""AdamW that collects the tensors of its fused kernel once."""

from collections.abc import Callable
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.optim import AdamW
from typing_extensions import override


class _Collected(NamedTuple):
    """The tensors of a parameter group, in the order of its weights."""

    weights: list[Tensor]
    averages: list[Tensor]
    squares: list[Tensor]
    steps: list[Tensor]


class FusedAdamW(AdamW):
    """AdamW by one kernel for all weights of a group.

    PyTorch's own looks up the state of every weight in every step, which takes longer than the
    kernel on a model of a million weights. Here this happens only if other weights have gradients
    than in the step before, or if a state was loaded.
    """

    def __init__(self, weights: Any, lr: float, weight_decay: float) -> None:
        super().__init__(weights, lr=lr, weight_decay=weight_decay, fused=True)
        self._collected: list[_Collected] | None = None

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a state, whose tensors are others."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._collected = None

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all weights that have a gradient."""
        if closure or not self._is_collected():
            loss: float | None = super().step(closure)
            self._collected = [self._collect(group["params"]) for group in self.param_groups]
            return loss
        assert self._collected is not None
        for group, tensors in zip(self.param_groups, self._collected, strict=True):
            torch._foreach_add_(tensors.steps, 1)
            torch._fused_adamw_(
                tensors.weights,
                [weight.grad for weight in tensors.weights if weight.grad is not None],
                tensors.averages,
                tensors.squares,
                [],
                tensors.steps,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )
        return None

    def _is_collected(self) -> bool:
        """Whether the same weights have gradients as when tensors were collected."""
        if self._collected is None:
            return False
        with_gradient = [
            weight
            for group in self.param_groups
            for weight in group["params"]
            if weight.grad is not None
        ]
        collected = [weight for tensors in self._collected for weight in tensors.weights]
        return len(with_gradient) == len(collected) and all(
            a is b for a, b in zip(with_gradient, collected, strict=True)
        )

    def _collect(self, weights: list[Tensor]) -> _Collected:
        updated = [weight for weight in weights if weight.grad is not None]
        states = [self.state[weight] for weight in updated]
        return _Collected(
            updated,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["step"] for state in states],
        )
