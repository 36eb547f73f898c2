"""Embedding tables in torch alone, for students and for machines where fbgemm has no build."""

from collections.abc import Collection

import torch
from torch import Tensor, nn


class PlainTables(nn.Module):
    """One sparse `nn.Embedding` a table; ids (…) of each to vectors (…, d).

    Those that are named `blank` start from zero: a row that was never learned tells nothing.
    """

    def __init__(self, rows: dict[str, int], width: int, blank: Collection[str] = ()) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {name: nn.Embedding(n, width, sparse=True) for name, n in rows.items()}
        )
        for key, weight in self.named_parameters():
            nn.init.normal_(weight, std=0.0 if key.split(".")[-2] in blank else 0.05)

    def forward(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        """Look up the ids of each table."""
        return {name: self.tables[name](values) for name, values in ids.items()}

    def optimizer(self, learning_rate: float) -> torch.optim.Optimizer:
        """AdaGrad, which reads and writes only the rows of a batch."""
        return torch.optim.Adagrad(self.parameters(), lr=learning_rate, eps=1e-8)
