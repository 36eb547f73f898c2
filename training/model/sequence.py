"""The ragged sequence side: encode events, pool them for a request, attend from a candidate.

N events of R requests, B candidates, W width, H heads. Offsets cut positions into requests.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.ops.attention import CAUSAL, SOFTMAX, Kind, attention


class Attention(nn.Module):
    """Multi-head attention from queries (Nq, W) to keys (Nk, W) of the same request."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        q_offsets: Tensor,
        kv_offsets: Tensor,
        kind: Kind = SOFTMAX,
        window: int | None = None,
    ) -> Tensor:
        """(Nq, W); see `training.ops.attention`."""
        q, k, v = (
            project(x).unflatten(1, (self.heads, x.shape[1] // self.heads))
            for project, x in ((self.q, queries), (self.k, keys), (self.v, keys))
        )
        return self.out(attention(q, k, v, q_offsets, kv_offsets, kind, window).flatten(1))


class EventLayer(nn.Module):
    """A pre-norm transformer layer with causal attention in a window."""

    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.ffn = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)
        )
        self.window = window

    def forward(self, events: Tensor, offsets: Tensor) -> Tensor:
        """(N, W) to (N, W)."""
        x = self.norm(events)
        events = events + self.attention(x, x, offsets, offsets, CAUSAL, self.window)
        return events + self.ffn(events)


class Summary(nn.Module):
    """A request's history as rows: learned seeds that attend to it (PMA), and its last events."""

    def __init__(self, width: int, heads: int, pooled: int, recent: int) -> None:
        super().__init__()
        self.seeds = nn.Parameter(torch.randn(pooled, width) * width**-0.5)
        self.attention = Attention(width, heads)
        self.recent = recent

    def forward(self, events: Tensor, offsets: Tensor) -> Tensor:
        """(N, W) to (R, pooled + recent, W); a missing event is a row of zeros."""
        requests, pooled = len(offsets) - 1, len(self.seeds)
        q_offsets = torch.arange(requests + 1, device=events.device) * pooled
        seeds = self.seeds.repeat(requests, 1)
        pooled_rows = self.attention(seeds, events, q_offsets, offsets).view(requests, pooled, -1)
        back = torch.arange(1, self.recent + 1, device=events.device)
        position = offsets[1:, None] - back
        there = position >= offsets[:-1, None]
        padded = F.pad(events, (0, 0, 0, 1))
        recent_rows = padded[torch.where(there, position, len(events))]
        return torch.cat((pooled_rows, recent_rows), 1)


class TargetAttention(nn.Module):
    """A candidate attends to its request's history (DIN's idea, with dot products).

    Queries and keys start with the same projection, so that like items match from the start.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.attention.k.weight.data.copy_(self.attention.q.weight.data)

    def forward(
        self, candidates: Tensor, events: Tensor, request: Tensor, offsets: Tensor
    ) -> Tensor:
        """Candidates (B, W), sorted by `request` (B), to (B, W)."""
        counts = torch.bincount(request, minlength=len(offsets) - 1)
        q_offsets = F.pad(counts.cumsum(0), (1, 0))
        return self.attention(candidates, events, q_offsets, offsets)
