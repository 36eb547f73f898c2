"""DCNv2 (2008.13535) and DHEN (2203.11014). B batch, n rows in, m rows out, d row width."""

import torch
from torch import Tensor, nn

from training.model.interaction.wukong import RowLinear


class CrossLayer(nn.Module):
    """x_0 * (W x + b) + x with a low-rank W (DCNv2, section 3.2): (B, n d) to (B, n d)."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        """`x0` is the input of the stack, `x` that of the layer."""
        crossed: Tensor = x0 * self.up(self.down(x)) + x
        return crossed


class DCNv2(nn.Module):
    """A stack of cross layers over the concatenated rows: (n, B, d) to (n, B, d)."""

    def __init__(self, rows: int, width: int, layers: int, rank: int) -> None:
        super().__init__()
        self.out_rows = rows
        self.layers = nn.ModuleList(CrossLayer(rows * width, rank) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Feature crosses up to order layers + 1."""
        x0 = crossed = x.transpose(0, 1).flatten(1)
        for layer in self.layers:
            crossed = layer(x0, crossed)
        return crossed.reshape(x.shape[1], self.out_rows, -1).transpose(0, 1)


class DhenLayer(nn.Module):
    """LN(DOT(X) + DCN(X) + W_R X): (n, B, d) to (m, B, d).

    DOT is a linear layer over the dot products of all pairs of rows, DCN a cross layer followed by
    linear combinations of its rows: the two interactions of DHEN in InterFormer (2411.09852).
    """

    pair_index: Tensor

    def __init__(self, rows: int, out_rows: int, width: int, rank: int) -> None:
        super().__init__()
        self.rows, self.out_rows, self.width = rows, out_rows, width
        self.register_buffer("pair_index", torch.triu_indices(rows, rows, 1), persistent=False)
        self.dot = nn.Linear(rows * (rows - 1) // 2, out_rows * width)
        self.cross = CrossLayer(rows * width, rank)
        self.cross_projection, self.residual = RowLinear(rows, out_rows), RowLinear(rows, out_rows)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Sum of both interactions and the shortcut, normalized."""
        by_example = x.transpose(0, 1)
        products = by_example @ by_example.transpose(1, 2)
        dot = self.dot(products[:, self.pair_index[0], self.pair_index[1]])
        flat = by_example.flatten(1)
        crossed = self.cross(flat, flat).unflatten(1, (self.rows, -1)).transpose(0, 1)
        dot_rows = dot.unflatten(1, (self.out_rows, -1)).transpose(0, 1)
        out: Tensor = self.norm(dot_rows + self.cross_projection(crossed) + self.residual(x))
        return out


class Dhen(nn.Module):
    """A stack of DHEN layers: (n, B, d) to (m, B, d)."""

    def __init__(self, rows: int, width: int, layers: int, out_rows: int, rank: int) -> None:
        super().__init__()
        self.out_rows = out_rows
        inputs = [rows] + [out_rows] * (layers - 1)
        self.layers = nn.ModuleList(DhenLayer(n, out_rows, width, rank) for n in inputs)

    def forward(self, x: Tensor) -> Tensor:
        """Apply all layers."""
        for layer in self.layers:
            x = layer(x)
        return x
