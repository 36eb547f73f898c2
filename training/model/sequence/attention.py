"""Attention modules over ragged sequences, and rotary embeddings of position and time.

N events of R requests, B candidates, W width, H heads, D = W / H width of a head, I item width.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.ops.attention import CAUSAL, SOFTMAX, AttentionKind, attention
from training.ops.ragged import position_in_segment

MINUTE = 60.0  # seconds


@dataclass(frozen=True)
class RotaryAngles:
    """Rotation angles of each event, as `cos` and `sin` (N, 1, D / 2)."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate (N, H, D); pair i is (x_i, x_{i + D/2})."""
        a, b = x.chunk(2, -1)
        return torch.cat((a * self.cos - b * self.sin, a * self.sin + b * self.cos), -1)


class RotaryTimeEncoding(nn.Module):
    """Rotary embeddings (RoPE, 2104.09864) of position and time (as ROTE of Kunlun, 2602.10016).

    The product of a rotated query and key depends on their distance in position and in time. Kunlun
    does not publish the exact formula; here half of the pairs of a head rotate by position, half by
    ln(1 + age / minute), so that a ratio of ages is an angle, for minutes as for weeks.
    """

    position_frequencies: Tensor
    time_frequencies: Tensor

    def __init__(self, head_dim: int, max_position: int = 2048) -> None:
        super().__init__()
        pairs = head_dim // 2
        time_pairs = pairs // 2
        positions = _frequencies(pairs - time_pairs, max_position)
        times = _frequencies(time_pairs, 16) * math.pi
        self.register_buffer("position_frequencies", positions, persistent=False)
        self.register_buffer("time_frequencies", times, persistent=False)

    def forward(self, offsets: Tensor, ages: Tensor) -> RotaryAngles:
        """Angles of events whose `ages` (N) are in seconds."""
        position = position_in_segment(offsets).float()
        time = torch.log1p(ages / MINUTE)
        angle = torch.cat(
            (position[:, None] * self.position_frequencies, time[:, None] * self.time_frequencies),
            1,
        )
        return RotaryAngles(angle.cos()[:, None], angle.sin()[:, None])


def _frequencies(count: int, max_wavelength: float) -> Tensor:
    """Geometric sequence from 1 down to 1 / max_wavelength."""
    return max_wavelength ** -(torch.arange(count) / max(1, count - 1))


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(N, W) to (N, H, D)."""
    return x.reshape(x.shape[0], heads, x.shape[1] // heads)


class Attention(nn.Module):
    """Multi-head attention from queries (Nq, W) to keys (Nk, W) of the same sequence."""

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
        kind: AttentionKind = SOFTMAX,
        limits: Tensor | None = None,
    ) -> Tensor:
        """Attended values (Nq, W); see `training.ops.attention.reference` for `limits`."""
        q = split_heads(self.q(queries), self.heads)
        k, v = split_heads(self.k(keys), self.heads), split_heads(self.v(keys), self.heads)
        attended = attention(q, k, v, q_offsets, kv_offsets, kind, limits=limits)
        out: Tensor = self.out(attended.flatten(1))
        return out


class SelfAttention(nn.Module):
    """Causal self-attention of events, over all earlier ones or within a window."""

    def __init__(self, width: int, heads: int, window: int | None) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(
        self, events: Tensor, offsets: Tensor, rotary: RotaryAngles | None = None
    ) -> Tensor:
        """(N, W) to (N, W)."""
        q, k, v = (split_heads(x, self.heads) for x in self.qkv(events).chunk(3, 1))
        if rotary:
            q, k = rotary(q), rotary(k)
        attended = attention(q, k, v, offsets, offsets, CAUSAL, self.window)
        out: Tensor = self.out(attended.flatten(1))
        return out


class TargetAttention(nn.Module):
    """Attention from each candidate to its request's events (as DIN, 1706.06978; dot products).

    Query and key projections have equal initial weights, so that similar items match initially.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.attention.k.weight.data.copy_(self.attention.q.weight.data)

    def forward(
        self,
        candidates: Tensor,
        events: Tensor,
        request: Tensor,
        offsets: Tensor,
        limits: Tensor | None = None,
    ) -> Tensor:
        """Candidates (B, W), sorted by `request` (B), to (B, W).

        With `limits` (B) a candidate sees only the first `limits` events of its request.
        """
        q_offsets = _candidate_offsets(request, offsets)
        attended: Tensor = self.attention(candidates, events, q_offsets, offsets, limits=limits)
        return attended


def _candidate_offsets(request: Tensor, offsets: Tensor) -> Tensor:
    """Offsets (R + 1) that cut candidates, sorted by `request` (B), into requests."""
    counts = torch.bincount(request, minlength=len(offsets) - 1)
    return F.pad(counts.cumsum(0), (1, 0))


NORM_EPS = 1e-2  # large, so that LayerNorm does not amplify barely trained items
PRIOR_EVENTS = 5.0  # zero values added to each mean, to shrink means of few events


class LinearItemAttention(nn.Module):
    """Linear attention sum_s (K x . K x_s) V e_s / (n + 5); queries and keys depend on items only.

    If the events e_s contain labels, this is a kernel regression of labels on items. Softmax cannot
    express it: its weights are never negative, so disliking an opposite item has no effect.
    """

    def __init__(self, item_width: int, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(item_width, eps=NORM_EPS)
        self.key = nn.Linear(item_width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(
        self,
        candidates: Tensor,
        items: Tensor,
        events: Tensor,
        request: Tensor,
        offsets: Tensor,
        limits: Tensor,
    ) -> Tensor:
        """Candidates (B, I), sorted by `request` (B), and events' items (N, I) to (B, W).

        A candidate sees the first `limits` (B) of the `events` (N, W) of its request.
        """
        q, k = (split_heads(self.key(self.norm(x)), self.heads) for x in (candidates, items))
        v = split_heads(self.value(events), self.heads)
        q_offsets = _candidate_offsets(request, offsets)
        sums = attention(q, k, v, q_offsets, offsets, AttentionKind("identity"), limits=limits)
        out: Tensor = self.out(sums.flatten(1) / (limits + PRIOR_EVENTS)[:, None])
        return out
