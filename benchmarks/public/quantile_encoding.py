"""Numbers of public tables as rows of embeddings, by an MLP over their piecewise-linear encoding.

B rows, M numbers, T segments, d embedding width.
"""

import torch
from torch import Tensor, nn

from training.model.numeric import PiecewiseLinearEncoding, RunningStandardizer

SEGMENTS = 16
ROWS = 4  # of embeddings that all numbers make together


class QuantileEmbedding(nn.Module):
    """Numbers (B, M), NaN where missing, to ROWS rows of width d by an MLP.

    The weights of the encoding begin at zero: at first the MLP reads standardized numbers and flags
    of missing ones (version B of the encoding, 2203.05556). `edges` are (M, T + 1).
    """

    def __init__(self, edges: Tensor, width: int, hidden: int) -> None:
        super().__init__()
        numbers, segments = len(edges), edges.shape[1] - 1
        self.standardizer = RunningStandardizer(numbers)
        self.encoding = PiecewiseLinearEncoding(numbers, segments)
        self.encoding.edges.copy_(edges)
        self.linear = nn.Linear(2 * numbers, hidden)
        self.piecewise = nn.Linear(numbers * segments, hidden, bias=False)
        nn.init.zeros_(self.piecewise.weight)
        self.out = nn.Linear(hidden, ROWS * width)

    def forward(self, values: Tensor) -> Tensor:
        """(B, M) to (B, ROWS, d)."""
        flags = (~values.isfinite()).float()
        h = self.linear(torch.cat((self.standardizer(values), flags), 1))
        h = h + self.piecewise(self.encoding(values).flatten(1))
        rows: Tensor = self.out(torch.relu(h)).unflatten(1, (ROWS, -1))
        return rows
