"""What the non-sequence side does to events: feed-forward layers that it writes.

N events of R requests, n rows of a request, W width, H heads, m hidden width.
"""

import torch
from torch import Tensor, nn

from training.model.sequence.attention import heads_of
from training.ops.attention import Kind, attention


class PersonalisedFFN(nn.Module):
    """S W(X) with W(X) = X^T W in (W, W), one matrix a request (InterFormer, 2411.09852).

    S X^T W is attention without softmax: the n rows are the keys, and W their values.
    """

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.randn(rows, width) * rows**-0.5)
        self.kind = Kind("identity", inside=width**-0.5)

    def forward(self, events: Tensor, offsets: Tensor, rows: Tensor) -> Tensor:
        """Events (N, W) and rows (R, n, W) to (N, W)."""
        values = self.values.expand_as(rows)
        return _attend(events, rows, values, offsets, 1, self.kind)


class Gdpa(nn.Module):
    """act(S K(X)^T) V(X) a head: generalised dot-product attention (Kunlun, 2602.10016).

    A personalised two-layer feed-forward net act(S A(X)) C(X) of hidden width m is this with the m
    columns of A(X) as keys and the m rows of C(X) as values; keys and values come from the rows.
    """

    def __init__(self, rows: int, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.hidden = heads, hidden
        self.keys = nn.Linear(rows, hidden, bias=False)
        self.values = nn.Linear(rows, hidden, bias=False)
        self.key_width = nn.Linear(width, width, bias=False)
        self.value_width = nn.Linear(width, width, bias=False)
        self.kind = Kind("gelu", outside=hidden**-0.5)

    def forward(self, events: Tensor, offsets: Tensor, rows: Tensor) -> Tensor:
        """Events (N, W) and rows (R, n, W) to (N, W)."""
        keys, values = self.generated(rows)
        return _attend(events, keys, values, offsets, self.heads, self.kind)

    def generated(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (R, m, W) that rows (R, n, W) write."""
        by_width = rows.transpose(1, 2)
        keys = self.key_width(self.keys(by_width).transpose(1, 2))
        return keys, self.value_width(self.values(by_width).transpose(1, 2))


def _attend(
    events: Tensor, keys: Tensor, values: Tensor, offsets: Tensor, heads: int, kind: Kind
) -> Tensor:
    """Events (N, W) to keys and values (R, m, W) of their request."""
    requests, m, _ = keys.shape
    kv_offsets = torch.arange(requests + 1, device=keys.device) * m
    q, k, v = (heads_of(x, heads) for x in (events, keys.flatten(0, 1), values.flatten(0, 1)))
    return attention(q, k, v, offsets, kv_offsets, kind).flatten(1)
