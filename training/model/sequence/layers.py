"""Layers that encode a sequence of events. N events, W width, H heads."""

import torch.nn.functional as F
from torch import Tensor, nn

from training.model.sequence.attention import SelfAttention, heads_of
from training.model.sequence.rotary import Turn
from training.ops.attention import Kind, attention


class TransformerLayer(nn.Module):
    """S + MHA(LN(S)), then + FFN(LN(.)): pre-norm, causal, in a window or not."""

    def __init__(self, width: int, heads: int, window: int | None, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads, window)
        self.ffn = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, width)
        )

    def forward(self, events: Tensor, offsets: Tensor, turn: Turn | None = None) -> Tensor:
        """(N, W) to (N, W)."""
        events = events + self.attention(self.norm(events), offsets, turn)
        return events + self.ffn(events)


class HstuLayer(nn.Module):
    """S + (LN(A V) * U) W_o, with [U, V, Q, K] = SiLU(LN(S) W) and A = SiLU(Q K^T) / n.

    HSTU (2402.17152, section 3.2) with no bias of position or time: `RotaryTime` stands for both.
    n is a constant, `longest`: scores may not depend on how long the history is.
    """

    def __init__(self, width: int, heads: int, window: int | None, longest: int) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.kind = Kind("silu", causal=True, inside=1.0, outside=1 / (window or longest))
        self.norm, self.inner = nn.LayerNorm(width), nn.LayerNorm(width)
        self.uvqk = nn.Linear(width, 4 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, events: Tensor, offsets: Tensor, turn: Turn | None = None) -> Tensor:
        """(N, W) to (N, W)."""
        u, v, q, k = F.silu(self.uvqk(self.norm(events))).chunk(4, 1)
        q, k, v = (heads_of(x, self.heads) for x in (q, k, v))
        if turn:
            q, k = turn(q), turn(k)
        found = attention(q, k, v, offsets, offsets, self.kind, self.window).flatten(1)
        return events + self.out(self.inner(found) * u)
