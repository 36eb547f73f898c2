"""Summaries that non-sequence rows and sequences exchange, and MaskNet over event attributes.

R sequences, N events, n non-sequence rows of each sequence, d width of a row, W width of an event,
k attributes of an event.
"""

import torch
from torch import Tensor, nn

from training.model.interaction.wukong import RowLinear
from training.model.sequence.pooling import HierarchicalSeedPooling, PmaPooling, most_recent_events
from training.model.sequence.pyramid import EncodedEvents


class SelfGate(nn.Module):
    """x * sigmoid(W x), (…, d) to (…, d).

    InterFormer (2411.09852) prints sigmoid(x * W x), which would lose the signs of x.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.activation = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        """Gate each row by itself."""
        gated: Tensor = x * self.activation(self.linear(x))
        return gated


class ContextSummary(nn.Module):
    """Gate(LCE(X)): linear combinations of the rows, (R, n, d) to (R, m, d)."""

    def __init__(self, rows: int, out_rows: int, width: int) -> None:
        super().__init__()
        self.row_linear = RowLinear(rows, out_rows)
        self.gate = SelfGate(width)

    def forward(self, x: Tensor) -> Tensor:
        """Combined rows."""
        summary: Tensor = self.gate(self.row_linear(x.transpose(0, 1)).transpose(0, 1))
        return summary


class SequenceSummary(nn.Module):
    """Gate([pooled rows ; last rows]) of a sequence, projected to rows of width d.

    Rows pooled by `pooling` are followed by the last events, newest first; CLS tokens are the last
    of a sequence. InterFormer's [CLS ; PMA ; recent] in another order.
    """

    def __init__(
        self, pooling: PmaPooling | HierarchicalSeedPooling, last_rows: int, width: int, row: int
    ) -> None:
        super().__init__()
        self.pooling, self.last_rows = pooling, last_rows
        self.out = nn.Linear(width, row)
        self.gate = SelfGate(row)

    def forward(self, encoded: EncodedEvents) -> Tensor:
        """Rows (R, pooled rows + last rows, d)."""
        pooled = self.pooling(encoded.events, encoded.offsets)
        last = most_recent_events(encoded.events, encoded.offsets, self.last_rows)
        summary: Tensor = self.gate(self.out(torch.cat((pooled, last), 1)))
        return summary


class MaskNet(nn.Module):
    """MLP_lce(S * MLP_mask(S)) of the attributes of an event side by side: (N, k W) to (N, W).

    The mask, made of all attributes, weights each of them in its context: the sequence
    preprocessing of InterFormer (2411.09852), after MaskNet (2102.07619).
    """

    def __init__(self, attributes: int, width: int) -> None:
        super().__init__()
        side_by_side = attributes * width
        self.mask = nn.Sequential(
            nn.Linear(side_by_side, width), nn.SiLU(), nn.Linear(width, side_by_side)
        )
        self.combine = nn.Sequential(
            nn.Linear(side_by_side, width), nn.SiLU(), nn.Linear(width, width)
        )

    def forward(self, attributes: Tensor) -> Tensor:
        """Combined attributes."""
        combined: Tensor = self.combine(attributes * self.mask(attributes))
        return combined
