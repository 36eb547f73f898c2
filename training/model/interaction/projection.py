"""The projection Y of Wukong's factorisation machine: learned, or made from the input.

B batch, n rows, d width, k rank, c compressed rows, h hidden width.
"""

from torch import Tensor, nn

from training.model.interaction.rows import RowMix


class StaticProjection(nn.Module):
    """Y in (n, k), the same for all examples (2403.02545, section 3.2)."""

    def __init__(self, rows: int, rank: int) -> None:
        super().__init__()
        self.y = RowMix(rows, rank)

    def forward(self, x: Tensor) -> Tensor:
        """X^T Y of each example: (n, B, d) to (B, d, k)."""
        return self.y(x).permute(1, 2, 0)


class AttentiveProjection(nn.Module):
    """Y(X) in (B, n, k), made from the input: reshape(MLP(flatten(W_c X))) (section 3.2)."""

    def __init__(self, rows: int, width: int, rank: int, hidden: int, compressed: int = 4) -> None:
        super().__init__()
        self.shape = rows, rank
        self.compress = RowMix(rows, compressed)
        self.mlp = nn.Sequential(
            nn.Linear(compressed * width, hidden), nn.ReLU(), nn.Linear(hidden, rows * rank)
        )

    def forward(self, x: Tensor) -> Tensor:
        """X^T Y(X) of each example: (n, B, d) to (B, d, k)."""
        summary = self.compress(x).transpose(0, 1).flatten(1)
        return x.permute(1, 2, 0) @ self.mlp(summary).unflatten(1, self.shape)
