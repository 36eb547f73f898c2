"""No interactions: the rows as they are, for the MLP behind (what DIN and HSTU have)."""

from torch import Tensor, nn


class Plain(nn.Module):
    """(n, B, d) to the same."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.out_rows = rows

    def forward(self, x: Tensor) -> Tensor:
        """The rows."""
        return x
