"""DCNv2 (2008.13535): explicit crosses with the input. B batch, n rows, d width."""

from torch import Tensor, nn


class CrossLayer(nn.Module):
    """x_0 * (W x + b) + x, W of low rank (section 3.2): (B, n d) to (B, n d)."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width)

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        """The input of the stack and of the layer to the output of the layer."""
        return first * self.up(self.down(x)) + x


class DCNv2(nn.Module):
    """A stack of crosses over all rows side by side: (n, B, d) to (n, B, d)."""

    def __init__(self, rows: int, width: int, layers: int, rank: int) -> None:
        super().__init__()
        self.out_rows = rows
        self.layers = nn.ModuleList(CrossLayer(rows * width, rank) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Crosses up to order layers + 1."""
        first = crossed = x.transpose(0, 1).flatten(1)
        for layer in self.layers:
            crossed = layer(first, crossed)
        return crossed.unflatten(1, (self.out_rows, -1)).transpose(0, 1)
