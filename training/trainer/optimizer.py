"""Optimizers of the dense weights: AdamW, or Muon for hidden matrices and AdamW for the others."""

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon
from typing_extensions import override

from training.config import TrainConfig
from training.distributed.dense import clip_gradients
from training.model.gem import Gem
from training.model.interaction.wukong import RowLinear
from training.trainer.fused_adamw import FusedAdamW


def dense_optimizer(core: Gem, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of the dense weights of a GEM, which clips their gradients if configured."""
    optimizer: torch.optim.Optimizer
    if config.dense_optimizer == "muon":
        optimizer = MuonAdamW(core, config.dense_lr, config.weight_decay)
    else:
        optimizer = FusedAdamW(core.parameters(), config.dense_lr, config.weight_decay)
    if config.max_grad_norm:
        _clip_before_steps(optimizer, core, config.max_grad_norm)
    return optimizer


def _clip_before_steps(optimizer: torch.optim.Optimizer, core: Gem, max_norm: float) -> None:
    """Clip the gradients of a model before each step of an optimizer."""

    def clip(*_: object) -> None:
        clip_gradients(core.parameters(), max_norm)

    optimizer.register_step_pre_hook(clip)


def hidden_matrices(core: Gem) -> list[Tensor]:
    """The matrices between hidden layers, which Muon trains.

    Those of linear layers in the interaction module, the sequence layers and the upper layers of
    the trunk. Not embeddings, layers that read numbers, heads and gates, nor the nets of tokens,
    whose weights are stacked: the optimizer would take a stack for one matrix.
    """
    modules = (core.interaction, core.history.encoder, core.trunk[1:])
    return [
        layer.weight
        for module in modules
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear | RowLinear) and "gate" not in name.split(".")
    ]


class MuonAdamW(torch.optim.Optimizer):
    """Muon (2502.16982) for the hidden matrices of a GEM, AdamW for its other weights.

    Muon's step is an orthogonal matrix, by Newton-Schulz iterations of the momentum, and is scaled
    to the size of AdamW's step, so that both have the same rate and weight decay. Both optimizers
    share the parameter groups and the state of this one.
    """

    def __init__(self, core: Gem, lr: float, weight_decay: float) -> None:
        matrices = hidden_matrices(core)
        is_matrix = set(matrices)
        others = [weight for weight in core.parameters() if weight not in is_matrix]
        options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        self._parts = (
            Muon(matrices, adjust_lr_fn="match_rms_adamw", **options),
            AdamW(others, fused=True, **options),
        )
        groups = [group for part in self._parts for group in part.param_groups]
        super().__init__(groups, options)
        self._share_state()

    def _share_state(self) -> None:
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the groups and the state, which loading replaces."""
        super().__setstate__(state)
        self._share_state()

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @override
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all weights that have a gradient."""
        loss = closure() if closure else None
        for part in self._parts:
            part.step()  # type: ignore[no-untyped-call]
        return loss
