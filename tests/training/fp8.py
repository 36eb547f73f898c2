"""Random matrices and a small model of linear layers, for tests of FP8."""

import torch
from torch import Tensor, nn

from training.precision.precision_map import RecipeName

FP8: tuple[RecipeName, ...] = ("fp8_tensor", "fp8_row", "fp8_block")  # e4m3 in forward products


def normals(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Model(nn.Module):
    """A model with a trunk of two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 8))
        self.heads = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The output of the head."""
        return torch.as_tensor(self.heads(self.trunk(x)))
