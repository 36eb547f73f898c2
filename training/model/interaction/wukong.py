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
            AttentiveProjection(rows, d, k, h) if shape.attentive else StaticProjection(k)
        )
        self.norm = nn.LayerNorm(rows * k)
        self.mlp = nn.Sequential(nn.Linear(rows * k, h), nn.ReLU(), nn.Linear(h, shape.fm_rows * d))
        self.out = shape.fm_rows, d

    def forward(self, x: Tensor, read: Tensor) -> Tensor:
        """Interactions of all rows, as (Y^T X) X^T: O(n k d); `read` is what Y reads of X."""
        by_example = x.transpose(0, 1).contiguous()
        projected = self.projection(by_example, read.transpose(0, 1))
        fm = projected @ by_example.transpose(1, 2)
        return self.mlp(self.norm(fm.flatten(1))).unflatten(1, self.out).transpose(0, 1)


class WukongLayer(nn.Module):
    """X' = LN([FMB(X) ; W_L X] + W_R X): (n, B, d) to (n_F + n_L, B, d).

    W_R is the identity where the number of rows stays. Where it is learned, W_L and its part of
    W_R are one matrix; and what the projection reads of X is more rows of the same product.
    """

    def __init__(self, rows: int, shape: Shape) -> None:
        super().__init__()
        self.fm = FactorizationBlock(rows, shape)
        self.same = rows == shape.rows
        beside = 0 if self.same else shape.fm_rows
        self.parts = (self.fm.projection.reads, beside, shape.linear_rows)
        self.mix = RowMix(rows, sum(self.parts))
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """One layer: interactions of twice the order, and all lower ones."""
        read, beside, linear = self.mix(x).split(self.parts)
        fm = self.fm(x, read)
        if self.same:
            return self.norm(torch.cat((fm, linear)).add_(x))
        return self.norm(torch.cat((fm + beside, linear)))


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
