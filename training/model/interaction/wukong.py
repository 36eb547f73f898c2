"""Wukong (2403.02545): stacked factorization machines, and GEM's attention across its layers.

B batch, n rows in, n_F + n_L rows out, m rows out of a linear map, d row width, k rank, c
compressed rows, h hidden width. Rows are the first dimension, (n, B, d), so that mixing
them is one matrix product over the whole batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RowLinear(nn.Module):
    """W X for each example, with W in (m, n): (n, B, d) to (m, B, d)."""

    def __init__(self, rows: int, out_rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_rows, rows))
        nn.init.uniform_(self.weight, -(rows**-0.5), rows**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Linear combinations of the rows."""
        return (self.weight @ x.flatten(1)).reshape(-1, *x.shape[1:])


class StaticProjection(nn.Module):
    """Projection by a learned Y in (n, k), the same for all examples (section 3.2).

    The layer computes Y^T X together with its other linear maps of X, as `compressed`.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.compressed_rows = rank

    def forward(self, _x: Tensor, compressed: Tensor) -> Tensor:
        """Y^T X (B, k, d) of X (B, n, d)."""
        return compressed


class InputDependentProjection(nn.Module):
    """Projection by Y(X) = reshape(MLP(flatten(W_c X))) in (B, n, k) (section 3.2).

    The layer computes W_c X together with its other linear maps of X, as `compressed`.
    """

    def __init__(
        self, rows: int, width: int, rank: int, hidden: int, compressed_rows: int = 4
    ) -> None:
        super().__init__()
        self.compressed_rows = compressed_rows
        self.output_shape = rank, rows
        self.mlp = nn.Sequential(
            nn.Linear(compressed_rows * width, hidden), nn.ReLU(), nn.Linear(hidden, rows * rank)
        )

    def forward(self, x: Tensor, compressed: Tensor) -> Tensor:
        """Y(X)^T X (B, k, d) of X (B, n, d) and W_c X (B, c, d)."""
        projection: Tensor = self.mlp(compressed.flatten(1)).unflatten(1, self.output_shape)
        return projection @ x


class CrossLayerAttention(nn.Module):
    """X_i + g_i * MHA(X_i, [C_0 X_0 ; ... ; C_{i-1} X_{i-1}]), g_i = 0 at the start.

    Each layer attends to the inputs of all earlier layers, as in GEM's extension of Wukong, whose
    form is not published. C_j compresses the input of layer j to c rows. The gates start at zero,
    so that training starts from plain Wukong.
    """

    def __init__(self, rows: Sequence[int], width: int, compressed_rows: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.compress = nn.ModuleList(RowLinear(n, compressed_rows) for n in rows[:-1])
        self.q = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in rows[1:])
        self.kv = nn.ModuleList(nn.Linear(width, 2 * width, bias=False) for _ in rows[1:])
        self.gate = nn.Parameter(torch.zeros(len(rows) - 1, width))

    def forward(self, layer_index: int, x: Tensor, previous_inputs: Sequence[Tensor]) -> Tensor:
        """Add gated attention to the inputs of earlier layers to the input (n, B, d) of a layer."""
        if not previous_inputs:
            return x
        compressed = torch.cat(
            [compress(y) for compress, y in zip(self.compress, previous_inputs, strict=False)]
        )
        k, v = self.kv[layer_index - 1](compressed).chunk(2, -1)
        q = self.q[layer_index - 1](x)
        q, k, v = (rows.unflatten(2, (self.heads, -1)).permute(1, 2, 0, 3) for rows in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).flatten(2)
        return x + self.gate[layer_index - 1] * attended


@dataclass(frozen=True)
class WukongShape:
    """Sizes of a layer: `fm_rows` is n_F, `linear_rows` is n_L, `hidden` is h."""

    width: int
    fm_rows: int
    linear_rows: int
    rank: int
    hidden: int
    input_dependent_projection: bool = True

    @property
    def out_rows(self) -> int:
        """Number of output rows, n_F + n_L."""
        return self.fm_rows + self.linear_rows


class FactorizationMachineBlock(nn.Module):
    """FMB(X) = reshape(MLP(LN(flatten(X X^T Y)))): (n, B, d) to (n_F, B, d)."""

    def __init__(self, rows: int, shape: WukongShape) -> None:
        super().__init__()
        d, k, h = shape.width, shape.rank, shape.hidden
        self.projection = (
            InputDependentProjection(rows, d, k, h)
            if shape.input_dependent_projection
            else StaticProjection(k)
        )
        self.norm = nn.LayerNorm(rows * k)
        self.mlp = nn.Sequential(nn.Linear(rows * k, h), nn.ReLU(), nn.Linear(h, shape.fm_rows * d))
        self.output_shape = shape.fm_rows, d

    def forward(self, x: Tensor, compressed: Tensor) -> Tensor:
        """Interactions of all rows, as (Y^T X) X^T in O(n k d)."""
        by_example = x.transpose(0, 1).contiguous()
        projected = self.projection(by_example, compressed.transpose(0, 1))
        fm = projected @ by_example.transpose(1, 2)
        out: Tensor = self.mlp(self.norm(fm.flatten(1))).unflatten(1, self.output_shape)
        return out.transpose(0, 1)


class WukongLayer(nn.Module):
    """X' = LN([FMB(X) ; W_L X] + W_R X): (n, B, d) to (n_F + n_L, B, d).

    W_R is the identity if the number of rows stays the same. Otherwise it is learned: its part for
    the linear rows merges with W_L into one matrix. All linear maps of X, with that of the
    projection, are one product.
    """

    def __init__(self, rows: int, shape: WukongShape) -> None:
        super().__init__()
        self.fm_block = FactorizationMachineBlock(rows, shape)
        self.keeps_row_count = rows == shape.out_rows
        residual_rows = 0 if self.keeps_row_count else shape.fm_rows
        compressed_rows = self.fm_block.projection.compressed_rows
        self.split_sizes = (compressed_rows, residual_rows, shape.linear_rows)
        self.row_linear = RowLinear(rows, sum(self.split_sizes))
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer, which doubles the order of interactions and keeps lower orders."""
        compressed, residual, linear = self.row_linear(x).split(self.split_sizes)
        fm = self.fm_block(x, compressed).to(x.dtype)  # under autocast, sums are in fp32
        if self.keeps_row_count:
            rows = torch.cat((fm, linear.to(x.dtype))).add_(x)
        else:
            rows = torch.cat((fm + residual, linear.to(x.dtype)))
        out: Tensor = self.norm(rows)
        return out


class Wukong(nn.Module):
    """A stack of layers: (n, B, d) to the rows of the last layer, interactions up to 2^layers.

    Layers may have different numbers of rows: `shapes` are those of all layers. With
    `cross_layer_rows` each layer attends, with some heads, to that many compressed rows of every
    earlier layer.
    """

    def __init__(
        self, rows: int, shapes: Sequence[WukongShape], cross_layer_rows: int = 0, heads: int = 1
    ) -> None:
        super().__init__()
        self.out_rows = shapes[-1].out_rows
        inputs = [rows, *(shape.out_rows for shape in shapes[:-1])]
        self.layers = nn.ModuleList(
            WukongLayer(n, shape) for n, shape in zip(inputs, shapes, strict=True)
        )
        self.cross_layer_attention = (
            CrossLayerAttention(inputs, shapes[0].width, cross_layer_rows, heads)
            if cross_layer_rows
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply all layers."""
        previous_inputs: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            if self.cross_layer_attention:
                x = self.cross_layer_attention(index, x, previous_inputs)
                previous_inputs.append(x)
            x = layer(x)
        return x
