"""Wukong (2403.02545): stacked factorisation machines over rows of features.

B batch, n rows in, n_F + n_L rows out, d width, k rank, h hidden width. Rows come first, (n, B, d):
what mixes rows is one matrix product over the whole batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from training.model.interaction.across import AcrossLayers
from training.model.interaction.projection import AttentiveProjection, StaticProjection
from training.model.interaction.rows import RowMix


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer: `fm_rows` n_F, `linear_rows` n_L, and whether Y is made from the input."""

    width: int
    fm_rows: int
    linear_rows: int
    rank: int
    hidden: int
    attentive: bool = True

    @property
    def rows(self) -> int:
        """Rows out."""
        return self.fm_rows + self.linear_rows


class FactorizationBlock(nn.Module):
    """FMB(X) = reshape(MLP(LN(flatten(X X^T Y)))): (n, B, d) to (n_F, B, d)."""

    def __init__(self, rows: int, shape: Shape) -> None:
        super().__init__()
        d, k, h = shape.width, shape.rank, shape.hidden
        self.projection = (
            AttentiveProjection(rows, d, k, h) if shape.attentive else StaticProjection(rows, k)
        )
        self.norm = nn.LayerNorm(rows * k)
        self.mlp = nn.Sequential(nn.Linear(rows * k, h), nn.ReLU(), nn.Linear(h, shape.fm_rows * d))
        self.out = shape.fm_rows, d

    def forward(self, x: Tensor) -> Tensor:
        """Interactions of all rows, as X (X^T Y): O(n k d)."""
        fm = x.transpose(0, 1) @ self.projection(x)
        return self.mlp(self.norm(fm.flatten(1))).unflatten(1, self.out).transpose(0, 1)


class WukongLayer(nn.Module):
    """X' = LN([FMB(X) ; W_L X] + W_R X): (n, B, d) to (n_F + n_L, B, d).

    W_L X and W_R X are one product; W_R is the identity where the number of rows stays.
    """

    def __init__(self, rows: int, shape: Shape) -> None:
        super().__init__()
        self.fm = FactorizationBlock(rows, shape)
        self.linear_rows = shape.linear_rows
        self.same = rows == shape.rows
        self.mix = RowMix(rows, shape.linear_rows + (0 if self.same else shape.rows))
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """One layer: interactions of twice the order, and all lower ones."""
        mixed = self.mix(x)
        linear = mixed[: self.linear_rows]
        residual = x if self.same else mixed[self.linear_rows :]
        return self.norm(torch.cat((self.fm(x), linear)) + residual)


class Wukong(nn.Module):
    """A stack of layers: (n, B, d) to (n_F + n_L, B, d), interactions up to order 2^layers.

    With `across` rows kept of each layer, each also sees what all layers before it found (GEM).
    """

    def __init__(self, rows: int, layers: int, shape: Shape, across: int = 0) -> None:
        super().__init__()
        self.out_rows = shape.rows
        inputs = [rows] + [shape.rows] * (layers - 1)
        self.layers = nn.ModuleList(WukongLayer(n, shape) for n in inputs)
        self.across = AcrossLayers(inputs, shape.width, across) if across else None

    def forward(self, x: Tensor) -> Tensor:
        """All layers."""
        before: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            if self.across:
                x = self.across(number, x, before)
                before.append(x)
            x = layer(x)
        return x
