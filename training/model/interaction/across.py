"""Attention from a layer to all layers before it, as GEM extends Wukong (its form is unpublished).

B batch, n rows of a layer, d width, c rows kept of each layer.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.model.interaction.rows import RowMix


class AcrossLayers(nn.Module):
    """X_i + g_i * Attention(X_i, [C_0 X_0 ; ... ; C_{i-1} X_{i-1}]), g_i = 0 at the start.

    C_j keeps c rows of layer j's input. As the gates start from zero, so does the model from plain
    Wukong: what lower layers hold is taken in where it helps.
    """

    def __init__(self, rows: Sequence[int], width: int, kept: int) -> None:
        super().__init__()
        self.keep = nn.ModuleList(RowMix(n, kept) for n in rows[:-1])
        self.q = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in rows[1:])
        self.kv = nn.ModuleList(nn.Linear(width, 2 * width, bias=False) for _ in rows[1:])
        self.gate = nn.Parameter(torch.zeros(len(rows) - 1, width))

    def forward(self, number: int, x: Tensor, before: Sequence[Tensor]) -> Tensor:
        """Layer `number`'s input (n, B, d) with what it takes from the inputs of those before."""
        if not before:
            return x
        kept = [keep(y) for keep, y in zip(self.keep, before, strict=False)]
        k, v = self.kv[number - 1](torch.cat(kept)).transpose(0, 1).chunk(2, -1)
        q = self.q[number - 1](x).transpose(0, 1)
        found = F.scaled_dot_product_attention(q, k, v).transpose(0, 1)
        return x + self.gate[number - 1] * found
