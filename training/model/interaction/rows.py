"""Mixing rows. B batch, n rows in, m rows out, d width."""

import torch
from torch import Tensor, nn


class RowMix(nn.Module):
    """W X of each example, W in (m, n): (n, B, d) to (m, B, d), one product over the batch."""

    def __init__(self, rows: int, out_rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_rows, rows))
        nn.init.uniform_(self.weight, -(rows**-0.5), rows**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Each row out is a weighted sum of the rows in."""
        return (self.weight @ x.flatten(1)).unflatten(1, x.shape[1:])
