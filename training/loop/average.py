"""Weights averaged over the last steps: a model that is never annealed scores with these."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

SLOWEST = 0.998  # about the last 500 steps


def averaged(model: nn.Module) -> AveragedModel:
    """An exponential moving average of a model's weights (Polyak), with its newest buffers.

    The decay starts low, so that a short training is not an average with its own beginning.
    """
    return AveragedModel(model, multi_avg_fn=_move)


@torch.no_grad()
def _move(average: Sequence[Tensor], newest: Sequence[Tensor], steps: Tensor | int) -> None:
    """The next average; `steps` were averaged before."""
    n = int(steps)
    torch._foreach_lerp_(list(average), list(newest), 1 - min(SLOWEST, (1 + n) / (10 + n)))
