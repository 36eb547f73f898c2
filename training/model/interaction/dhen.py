"""DHEN (2203.11014): an ensemble of interactions in each layer. B batch, n rows, d width."""

import torch
from torch import Tensor, nn

from training.model.interaction.dcn import CrossLayer
from training.model.interaction.rows import RowMix


class DhenLayer(nn.Module):
    """LN(DOT(X) + DCN(X) + W_R X): (n, B, d) to (m, B, d).

    DOT gives the products of all pairs of rows to a linear layer; DCN is one cross layer, of which
    rows are mixed. The pair that InterFormer uses (2411.09852).
    """

    upper: Tensor

    def __init__(self, rows: int, out_rows: int, width: int, rank: int) -> None:
        super().__init__()
        self.rows, self.out_rows, self.width = rows, out_rows, width
        self.register_buffer("upper", torch.triu_indices(rows, rows, 1), persistent=False)
        self.dot = nn.Linear(rows * (rows - 1) // 2, out_rows * width)
        self.cross = CrossLayer(rows * width, rank)
        self.mix, self.residual = RowMix(rows, out_rows), RowMix(rows, out_rows)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        by_example = x.transpose(0, 1)
        products = by_example @ by_example.transpose(1, 2)
        dot = self.dot(products[:, self.upper[0], self.upper[1]])
        flat = by_example.flatten(1)
        crossed = self.cross(flat, flat).unflatten(1, (self.rows, -1)).transpose(0, 1)
        found = dot.unflatten(1, (self.out_rows, -1)).transpose(0, 1)
        return self.norm(found + self.mix(crossed) + self.residual(x))


class Dhen(nn.Module):
    """A stack of layers: (n, B, d) to (m, B, d)."""

    def __init__(self, rows: int, width: int, layers: int, out_rows: int, rank: int) -> None:
        super().__init__()
        self.out_rows = out_rows
        inputs = [rows] + [out_rows] * (layers - 1)
        self.layers = nn.ModuleList(DhenLayer(n, out_rows, width, rank) for n in inputs)

    def forward(self, x: Tensor) -> Tensor:
        """All layers."""
        for layer in self.layers:
            x = layer(x)
        return x
