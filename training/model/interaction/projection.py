"""The projection Y of Wukong's factorisation machine: learned, or made from the input.

B batch, n rows, d width, k rank, c compressed rows, h hidden width. A projection first reads
`reads` rows, linear combinations of X, which the layer takes together with its own.
"""

from torch import Tensor, nn


class StaticProjection(nn.Module):
    """Y in (n, k), the same for all examples (2403.02545, section 3.2): Y^T X is what it reads."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.reads = rank

    def forward(self, x: Tensor, read: Tensor) -> Tensor:
        """Y^T X of each example: X (B, n, d) and what was read of it (B, k, d) to (B, k, d)."""
        return read


class AttentiveProjection(nn.Module):
    """Y(X) in (B, n, k), made from the input: reshape(MLP(flatten(W_c X))) (section 3.2)."""

    def __init__(self, rows: int, width: int, rank: int, hidden: int, compressed: int = 4) -> None:
        super().__init__()
        self.reads = compressed
        self.transposed = rank, rows
        self.mlp = nn.Sequential(
            nn.Linear(compressed * width, hidden), nn.ReLU(), nn.Linear(hidden, rows * rank)
        )

    def forward(self, x: Tensor, read: Tensor) -> Tensor:
        """Y(X)^T X of each example: X (B, n, d) and W_c X (B, c, d) to (B, k, d)."""
        return self.mlp(read.flatten(1)).unflatten(1, self.transposed) @ x
