"""FinalMLP (2304.00902), the identity, and two interaction modules in parallel.

B batch, n rows in, m rows of a stream, d row width.
"""

import torch
from torch import Tensor, nn

from training.model.interaction.dcn_dhen import DCNv2, Dhen
from training.model.interaction.token_mixing import RankMixer
from training.model.interaction.wukong import Wukong


class IdentityInteraction(nn.Module):
    """No interactions: the rows go to the MLP unchanged, as in DIN and HSTU."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.out_rows = rows

    def forward(self, x: Tensor) -> Tensor:
        """The rows, unchanged."""
        return x


class GatedMlpStream(nn.Module):
    """MLP(x * 2 sigmoid(g(x))): a stream that selects its own features (section 4.1)."""

    def __init__(self, rows: int, width: int, hidden: int, out: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(rows, hidden), nn.ReLU(), nn.Linear(hidden, rows))
        self.mlp = nn.Sequential(
            nn.Linear(rows * width, hidden), nn.LayerNorm(hidden), nn.ReLU(), nn.Linear(hidden, out)
        )
        self.activation = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        """(B, n, d) to (B, out); the gate reads the mean of each row."""
        weight = 2 * self.activation(self.gate(x.mean(2)))
        out: Tensor = self.mlp((x * weight[..., None]).flatten(1))
        return out


class FinalMlp(nn.Module):
    """Two streams u and v and their bilinear products, row by row: (n, B, d) to (3 m, B, d).

    The products are u * (W v) with a W for each row; FinalMLP's multi-head bilinear fusion is their
    sum over d (section 4.2).
    """

    def __init__(self, rows: int, width: int, hidden: int, out_rows: int) -> None:
        super().__init__()
        self.width, self.out_rows = width, 3 * out_rows
        self.streams = nn.ModuleList(
            GatedMlpStream(rows, width, hidden, out_rows * width) for _ in range(2)
        )
        self.bilinear_weight = nn.Parameter(torch.randn(out_rows, width, width) * width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Rows of both streams, then their products."""
        by_example = x.transpose(0, 1)
        u, v = (
            stream(by_example).unflatten(1, (-1, self.width)).transpose(0, 1)
            for stream in self.streams
        )
        return torch.cat((u, v, u * (v @ self.bilinear_weight)))


SingleInteraction = Wukong | DCNv2 | Dhen | FinalMlp | RankMixer | IdentityInteraction


class ParallelInteraction(nn.Module):
    """Two interaction modules over the same rows; their outputs are concatenated."""

    def __init__(self, first: SingleInteraction, second: SingleInteraction) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.out_rows = first.out_rows + second.out_rows

    def forward(self, x: Tensor) -> Tensor:
        """Output rows of the first module, then of the second."""
        return torch.cat((self.first(x), self.second(x)))
