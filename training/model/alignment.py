"""Rows of a changed spec for modules that were trained on those of an earlier one.

n rows now, m rows in training, B batch, d row width.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

SEPARATOR = "|"  # of the parts of a name: a column, then positions within it
REMOVED = ""  # the name of a trained row whose feature no longer exists
Layout = dict[str, tuple[str, ...]]  # names of the rows that a module was trained on, by input


class RowAlignment(nn.Module):
    """Rows (n, B, d) to the rows (m, B, d) that a module was trained on: x_i + sum_j w_ij y_j.

    x_i is the row of the same name, zero if it was removed. y_j are the rows that were added since;
    their weights start at zero, so that at first they change nothing. A module whose number of rows
    grows could not keep its outputs: LayerNorm over all rows would have other statistics.
    `trained_names` are the names of the m rows, without those that were removed: a feature that
    comes back later is a new one.
    """

    kept: Tensor
    is_kept: Tensor
    added: Tensor

    def __init__(self, names: Sequence[str], trained: Sequence[str]) -> None:
        super().__init__()
        self.is_identity = tuple(names) == tuple(trained)
        self.added_names = tuple(name for name in names if name not in trained)
        self.trained_names = tuple(name if name in names else REMOVED for name in trained)
        self.out_rows = len(trained)
        position = {name: number for number, name in enumerate(names)}
        kept = torch.tensor([position.get(name, -1) for name in trained])
        added = torch.tensor([position[name] for name in self.added_names], dtype=torch.int64)
        self.register_buffer("kept", kept.clamp(min=0), persistent=False)
        self.register_buffer("is_kept", (kept >= 0)[:, None, None], persistent=False)
        self.register_buffer("added", added, persistent=False)
        self.weight = (
            nn.Parameter(torch.zeros(len(trained), len(added))) if self.added_names else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """The trained rows; `x` itself if the rows are the same."""
        if self.is_identity:
            return x
        rows = x[self.kept] * self.is_kept
        if self.weight is None:
            return rows
        return rows + (self.weight @ x[self.added].flatten(1)).view_as(rows)


def without_columns(layout: Layout, columns: Collection[str]) -> Layout:
    """A layout in which the rows of some columns are marked as removed."""
    removed = set(columns)
    return {
        part: tuple(REMOVED if removed & set(name.split(SEPARATOR)) else name for name in rows)
        for part, rows in layout.items()
    }
