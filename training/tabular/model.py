"""Fields to one logit. B rows, F fields, M numbers, d width, n rows of features."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from training.fitting.fit import Learner
from training.model.config import GemConfig
from training.model.interaction import interaction
from training.model.numeric import NumericRows

SIZE = GemConfig(row_width=16, layers=2, fm_rows=16, linear_rows=16, rank=8, mlp=256, dropout=0.2)
STREAMS = (SIZE, SIZE.model_copy(update={"interaction": "two_streams"}))


class Tabular(Learner):
    """A sum of logits: one of each field by itself, and one of each stream of interactions.

    Streams see the same embeddings and err apart, which a deeper stack of one kind does not.
    """

    first: Tensor

    def __init__(
        self, sizes: Sequence[int], numbers: int, streams: Sequence[GemConfig] = STREAMS
    ) -> None:
        super().__init__()
        d = streams[0].row_width
        starts = torch.tensor([0, *sizes]).cumsum(0)
        self.register_buffer("first", starts[:-1], persistent=False)
        self.table = nn.Embedding(int(starts[-1]), d)
        self.alone = nn.Embedding(int(starts[-1]), 1)
        nn.init.normal_(self.table.weight, std=0.01)
        nn.init.zeros_(self.alone.weight)
        self.bias = nn.Parameter(torch.zeros(1))
        rows = streams[0].numeric_rows if numbers else 0
        self.numbers = NumericRows(numbers, rows, d, streams[0].mlp) if numbers else None
        self.streams = nn.ModuleList(Stream(len(sizes) + rows, config) for config in streams)

    @property
    def embeddings(self) -> list[Tensor]:
        """The weights of single values, which memorise."""
        return [self.table.weight, self.alone.weight]

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        """Ids (B, F) and numbers (B, M) to logits (B)."""
        at = (ids + self.first).T
        x = self.table(at)
        if self.numbers:
            x = torch.cat((x, self.numbers(numbers)[0].transpose(0, 1)))
        alone = self.alone(at).sum(0)[:, 0] + self.bias
        return alone + torch.stack([stream(x) for stream in self.streams]).sum(0)


class Stream(nn.Module):
    """Interactions, and an MLP on what they gave: (n, B, d) to (B)."""

    def __init__(self, rows: int, config: GemConfig) -> None:
        super().__init__()
        self.interaction = interaction(rows, config)
        self.head = nn.Sequential(
            nn.Linear(self.interaction.out_rows * config.row_width, config.mlp),
            nn.LayerNorm(config.mlp),
            nn.ReLU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.mlp, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """One logit a row."""
        return self.head(self.interaction(x).transpose(0, 1).flatten(1))[:, 0]
