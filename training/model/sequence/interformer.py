"""InterFormer (2411.09852): sequences and rows of a request learn from each other, layer by layer.

R requests, n rows of one, d row width. The paper's rows hold the candidate too; here they are the
request's alone, so that all of this is computed once for all of its candidates.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from training.model.config import GemConfig
from training.model.interaction.rows import RowMix
from training.model.interaction.wukong import Shape, WukongLayer
from training.model.sequence.family import Family, families_of
from training.model.sequence.level import Encoded


class Gate(nn.Module):
    """x * sigmoid(W x): what a side lets through. The paper prints sigmoid(x * W x), without signs.

    (…, d) to (…, d).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Each row weighs itself."""
        return x * torch.sigmoid(self.linear(x))


class RowSummary(nn.Module):
    """Gate(LCE(X)): few rows of many, as linear combinations. (R, n, d) to (R, told, d)."""

    def __init__(self, rows: int, told: int, width: int) -> None:
        super().__init__()
        self.mix = RowMix(rows, told)
        self.gate = Gate(width)

    def forward(self, x: Tensor) -> Tensor:
        """What is told to the sequences."""
        return self.gate(self.mix(x.transpose(0, 1)).transpose(0, 1))


class InterFormer(nn.Module):
    """All families of events beside the rows of a request.

    Each layer: what the rows tell the sequences (n2s), a level of every sequence, and a Wukong
    layer over the rows and the sequences' summaries (s2n); `flow` says which of them there are.
    """

    def __init__(self, rows: int, config: GemConfig) -> None:
        super().__init__()
        options, d = config.sequence, config.row_width
        self.stacks = nn.ModuleList(Family(config, own) for own in families_of(config))
        self.depth = max(len(family.levels) for family in self.families)
        self.options = options
        summary = sum(family.rows for family in self.families)
        half = config.request_rows // 2
        shape = Shape(d, half, config.request_rows - half, config.rank, config.mlp)
        inputs = [rows] + [shape.rows if options.mixes else rows] * (self.depth - 1)
        self.tell = nn.ModuleDict(
            {
                str(number): RowSummary(n, config.told_rows, d)
                for number, n in enumerate(inputs)
                if options.hears(number)
            }
        )
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in inputs if options.mixes)
        self.mix = nn.ModuleList(WukongLayer(n + summary, shape) for n in inputs if options.mixes)
        self.out_rows = summary + (shape.rows if options.mixes else 0)

    @property
    def families(self) -> list[Family]:
        """One for each group of event types."""
        return cast("list[Family]", list(self.stacks))

    def forward(self, x: Tensor, found: Sequence[Encoded]) -> tuple[Tensor, list[Encoded]]:
        """Rows (R, n, d) and begun sequences to rows (R, m, d), and the full-length sequences.

        Those are as the first level left them: what is above is shorter.
        """
        full, summary = list(found), None
        for number in range(self.depth):
            told = self.tell[str(number)](x) if self.options.hears(number) else None
            found = [f.level(number, e, told) for f, e in zip(self.families, found, strict=True)]
            if number == 0:
                full = list(found)
            if self.options.mixes:
                if summary is None or self.options.pools(number):
                    summary = self._summaries(found)
                x = self._mixed(number, x, summary)
        last = self._summaries(found)
        return torch.cat((x, last), 1) if self.options.mixes else last, full

    def _mixed(self, number: int, x: Tensor, summary: Tensor) -> Tensor:
        rows = torch.cat((x, summary), 1).transpose(0, 1)
        return self.mix[number](self.norms[number](rows)).transpose(0, 1)

    def _summaries(self, found: Sequence[Encoded]) -> Tensor:
        return torch.cat([f.summary(e) for f, e in zip(self.families, found, strict=True)], 1)
