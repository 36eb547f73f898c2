"""Features as rows: strong ones have a row each, weak ones share few.

n examples, F features, d row width.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class GroupedRows(nn.Module):
    """Vectors of features (n, d) each, to a list of rows (n, d) each.

    Features with few values tell little: as a row each they would cost as much as the strong ones,
    and interactions among them are mostly noise. They go side by side through one projection, as
    Wukong groups small features (2403.02545, section 3.1).
    """

    def __init__(self, sizes: Mapping[str, int], width: int, below: int, shared: int) -> None:
        super().__init__()
        weak = [name for name, size in sizes.items() if size < below]
        self.weak = tuple(weak) if len(weak) > shared else ()
        self.strong = tuple(name for name in sizes if name not in self.weak)
        self.shared = shared if self.weak else 0
        self.rows = len(self.strong) + self.shared
        self.project = nn.Linear(len(self.weak) * width, shared * width) if self.weak else None

    def forward(self, vectors: Mapping[str, Tensor]) -> list[Tensor]:
        """Rows (n, d), the strong ones first."""
        rows = [vectors[name] for name in self.strong]
        if self.project:
            beside = torch.cat([vectors[name] for name in self.weak], 1)
            rows += self.project(beside).chunk(self.shared, 1)
        return rows
