"""Two streams, as FinalMLP has them (2304.00902). B batch, n rows, d width, m rows of a stream."""

import torch
from torch import Tensor, nn


class Stream(nn.Module):
    """MLP(x * 2 sigmoid(g(x))): a stream sees the features in its own weights (section 4.1)."""

    def __init__(self, rows: int, width: int, hidden: int, out: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(rows, hidden), nn.ReLU(), nn.Linear(hidden, rows))
        self.mlp = nn.Sequential(
            nn.Linear(rows * width, hidden), nn.LayerNorm(hidden), nn.ReLU(), nn.Linear(hidden, out)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, n, d) to (B, out); a row's weight comes from the means of all rows."""
        weight = 2 * torch.sigmoid(self.gate(x.mean(2)))
        return self.mlp((x * weight[..., None]).flatten(1))


class TwoStreams(nn.Module):
    """Two streams and their products, row by row: (n, B, d) to (3 m, B, d).

    The products u * (W v), W of each row its own, are what FinalMLP's bilinear fusion by heads
    sums up (section 4.2).
    """

    def __init__(self, rows: int, width: int, hidden: int, out_rows: int) -> None:
        super().__init__()
        self.width, self.out_rows = width, 3 * out_rows
        self.streams = nn.ModuleList(
            Stream(rows, width, hidden, out_rows * width) for _ in range(2)
        )
        self.fuse = nn.Parameter(torch.randn(out_rows, width, width) * width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Rows of both streams, and their products."""
        by_example = x.transpose(0, 1)
        u, v = (
            stream(by_example).unflatten(1, (-1, self.width)).transpose(0, 1)
            for stream in self.streams
        )
        return torch.cat((u, v, u * (v @ self.fuse)))
