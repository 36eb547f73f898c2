"""Dense features as rows. B batch, F numbers, d width."""

import torch
from torch import Tensor, nn


class NumericRows(nn.Module):
    """Numbers (B, F), NaN where missing, to `rows` rows of width d.

    Each number is standardised by its running statistics; a missing one is the mean, and flagged.
    """

    def __init__(self, numbers: int, rows: int, width: int, hidden: int) -> None:
        super().__init__()
        self.scale = nn.BatchNorm1d(numbers, affine=False, momentum=0.02)
        self.mlp = nn.Sequential(
            nn.Linear(2 * numbers, hidden), nn.ReLU(), nn.Linear(hidden, rows * width)
        )
        self.rows = rows

    def forward(self, numbers: Tensor) -> Tensor:
        """(B, F) to (B, rows, d)."""
        missing = numbers.isnan()
        mean = self.scale.running_mean
        filled = torch.where(missing, mean, numbers) if mean is not None else numbers
        scaled = self.scale(filled).clamp(-6, 6)
        return self.mlp(torch.cat((scaled, missing.float()), 1)).view(len(numbers), self.rows, -1)
