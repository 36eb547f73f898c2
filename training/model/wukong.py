"""Wukong (2403.02545): stacked factorisation machines over rows of features.

B batch, n rows in, n_F + n_L rows out, d width, k rank, c compressed rows.
"""

import torch
from torch import Tensor, nn


class AttentiveProjection(nn.Module):
    """Y(X) in (B, n, k): the FM's projection, made from the input (section 3.2, "default").

    Y = reshape(MLP(flatten(W_c X))).
    """

    def __init__(self, rows: int, width: int, rank: int, hidden: int, compressed: int = 4) -> None:
        super().__init__()
        self.compress = nn.Linear(rows, compressed, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(compressed * width, hidden), nn.ReLU(), nn.Linear(hidden, rows * rank)
        )
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        """(B, n, d) to (B, n, k)."""
        summary = self.compress(x.transpose(1, 2)).flatten(1)
        return self.mlp(summary).view(len(x), x.shape[1], self.rank)


class FactorizationBlock(nn.Module):
    """FMB(X) = reshape(MLP(LN(flatten(X X^T Y)))): (B, n, d) to (B, n_F, d)."""

    def __init__(self, rows: int, width: int, out_rows: int, rank: int, hidden: int) -> None:
        super().__init__()
        self.projection = AttentiveProjection(rows, width, rank, hidden)
        self.norm = nn.LayerNorm(rows * rank)
        self.mlp = nn.Sequential(
            nn.Linear(rows * rank, hidden), nn.ReLU(), nn.Linear(hidden, out_rows * width)
        )
        self.out_rows = out_rows

    def forward(self, x: Tensor) -> Tensor:
        """Interactions of all rows, as X (X^T Y): O(n k d)."""
        fm = x @ (x.transpose(1, 2) @ self.projection(x))
        return self.mlp(self.norm(fm.flatten(1))).view(len(x), self.out_rows, -1)


class WukongLayer(nn.Module):
    """X' = LN([FMB(X) ; W_L X] + W_R X): (B, n, d) to (B, n_F + n_L, d)."""

    def __init__(
        self, rows: int, width: int, fm_rows: int, linear_rows: int, rank: int, hidden: int
    ) -> None:
        super().__init__()
        out = fm_rows + linear_rows
        self.fm = FactorizationBlock(rows, width, fm_rows, rank, hidden)
        self.linear = nn.Linear(rows, linear_rows, bias=False)
        self.residual = nn.Identity() if rows == out else nn.Linear(rows, out, bias=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """One layer: interactions of twice the order, and all lower ones."""
        across = x.transpose(1, 2)
        linear = self.linear(across).transpose(1, 2)
        residual = self.residual(across).transpose(1, 2)
        return self.norm(torch.cat((self.fm(x), linear), 1) + residual)


class Wukong(nn.Module):
    """A stack of layers: (B, n, d) to (B, n_F + n_L, d)."""

    def __init__(
        self,
        rows: int,
        width: int,
        layers: int,
        fm_rows: int,
        linear_rows: int,
        rank: int,
        hidden: int,
    ) -> None:
        super().__init__()
        inputs = [rows] + [fm_rows + linear_rows] * (layers - 1)
        self.layers = nn.ModuleList(
            WukongLayer(n, width, fm_rows, linear_rows, rank, hidden) for n in inputs
        )
        self.out_rows = fm_rows + linear_rows

    def forward(self, x: Tensor) -> Tensor:
        """Interactions up to order 2^layers."""
        for layer in self.layers:
            x = layer(x)
        return x
