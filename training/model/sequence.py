"""The ragged sequence side: encode events, pool them for a request, attend from a candidate.

N events of R requests, B candidates, W width, H heads. Offsets cut positions into requests.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.ops.attention import attention, pairs


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
        window: int | None = None,
    ) -> Tensor:
        """(Nq, W); see `training.ops.attention`."""
        q, k, v = (
            project(x).unflatten(1, (self.heads, x.shape[1] // self.heads))
            for project, x in ((self.q, queries), (self.k, keys), (self.v, keys))
        )
        return self.out(attention(q, k, v, q_offsets, kv_offsets, window).flatten(1))


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
        events = events + self.attention(x, x, offsets, offsets, self.window)
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


class MatchedAttention(nn.Module):
    """A candidate attends to the events whose items share an attribute with its own.

    SIM's hard search (2006.05639): of a long history, those events tell most about a candidate.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(
        self, candidates: Tensor, events: Tensor, own: Tensor, seen: Tensor, request: Tensor,
        offsets: Tensor,
    ) -> Tensor:  # fmt: skip
        """Candidates (B, W) whose attribute is `own` (B), events (N, W) with `seen` (N): (B, W).

        0 is a missing attribute, which matches nothing.
        """
        by_candidate, q_offsets, by_event, kv_offsets = match(own, seen, request, offsets)
        q = self._split(self.q(candidates[by_candidate]))
        found = events[by_event]
        k, v = self._split(self.k(found)), self._split(self.v(found))
        attended = pairs.attention(q, k, v, q_offsets, kv_offsets).flatten(1)
        back = torch.empty_like(by_candidate)
        back[by_candidate] = torch.arange(len(back), device=back.device)
        return self.out(attended)[back]

    def _split(self, x: Tensor) -> Tensor:
        """(n, W) to (n, H, W / H)."""
        return x.unflatten(1, (self.heads, x.shape[1] // self.heads))


def match(
    own: Tensor, seen: Tensor, request: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Groups of candidates and events of one request and attribute.

    Returns candidates by group (B) and their offsets, matching events by group, oldest first, and
    their offsets.
    """
    span = 1 + int(torch.cat((own, seen)).max())
    requests = torch.repeat_interleave(
        torch.arange(len(offsets) - 1, device=own.device), offsets.diff()
    )
    event_key, by_event = (requests * span + seen).sort(stable=True)
    key, by_candidate = (request * span + own).sort(stable=True)
    groups, counts = torch.unique_consecutive(key, return_counts=True)
    first = torch.searchsorted(event_key, groups)
    stop = torch.searchsorted(event_key, groups, right=True)
    stop = torch.where(groups % span == 0, first, stop)
    lengths = stop - first
    kv_offsets = F.pad(lengths.cumsum(0), (1, 0))
    at = torch.arange(int(kv_offsets[-1]), device=own.device)
    at = at + torch.repeat_interleave(first - kv_offsets[:-1], lengths)
    return by_candidate, F.pad(counts.cumsum(0), (1, 0)), by_event[at], kv_offsets
