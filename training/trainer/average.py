"""The exponential moving average (EMA) of the weights, which is used for inference.

The learning rate decays only at the end of each day, and averaging has a similar effect before.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from typing_extensions import override

MAX_EMA_DECAY = 0.998  # about the last 500 steps


class EmaModel(AveragedModel):
    """The EMA of a model's weights (Polyak averaging), with the latest buffers.

    The decay starts low, so that initial weights have little effect after a short training.
    Parameters and buffers are collected once, because walking all modules takes longer than the
    average itself: they may not be replaced after the first update.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._collected: tuple[nn.Module, _TensorPairs] | None = None
        self._steps: int | None = 0  # n_averaged, on the host; None if it must be read

    @override
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Restore averages, and the number of steps with them."""
        self._steps = None
        return super().load_state_dict(*args, **kwargs)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Add the latest weights to the average."""
        if self._collected is None or self._collected[0] is not model:
            self._collected = model, _TensorPairs.of(self.module, model)
        pairs = self._collected[1]
        steps = int(self.n_averaged) if self._steps is None else self._steps
        decay = min(MAX_EMA_DECAY, (1 + steps) / (10 + steps)) if steps else 0.0
        torch._foreach_lerp_(pairs.averages, pairs.weights, 1 - decay)
        if pairs.buffers:
            torch._foreach_copy_(pairs.buffers, pairs.latest_buffers)
        self.n_averaged += 1
        self._steps = steps + 1


class _TensorPairs(NamedTuple):
    """Parameters and buffers of an averaged model, and those of the model that is averaged."""

    averages: list[Tensor]
    weights: list[Tensor]
    buffers: list[Tensor]
    latest_buffers: list[Tensor]

    @classmethod
    def of(cls, averaged: nn.Module, model: nn.Module) -> "_TensorPairs":
        """The tensors of both models, in the same order."""
        modules = averaged, model
        averages, weights = ([p.detach() for p in m.parameters()] for m in modules)
        buffers, latest_buffers = ([b.detach() for b in m.buffers()] for m in modules)
        return cls(averages, weights, buffers, latest_buffers)
