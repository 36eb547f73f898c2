"""Two kinds of interactions beside each other: both see the rows, what is behind them sees both."""

import torch
from torch import Tensor, nn

from training.model.interaction.dcn import DCNv2
from training.model.interaction.dhen import Dhen
from training.model.interaction.plain import Plain
from training.model.interaction.streams import TwoStreams
from training.model.interaction.wukong import Wukong

Single = Wukong | DCNv2 | Dhen | TwoStreams | Plain


class Beside(nn.Module):
    """(n, B, d) to the rows of both."""

    def __init__(self, one: Single, other: Single) -> None:
        super().__init__()
        self.one, self.other = one, other
        self.out_rows = one.out_rows + other.out_rows

    def forward(self, x: Tensor) -> Tensor:
        """Both, row by row."""
        return torch.cat((self.one(x), self.other(x)))
