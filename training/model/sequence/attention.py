"""Attention modules over ragged sequences, and rotary embeddings of position and time.

N events of R requests, W width, H heads, D = W / H width of a head.
"""

import math
from dataclasses import dataclass, replace

import torch
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
        position = position_in_segment(offsets, len(ages)).float()
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


def absorbs_projections(q: Tensor, keys: Tensor, sequences: int) -> bool:
    """Whether `absorbed_attention` of queries (Nq, H, D) to keys (Nk, W) takes fewer products.

    It saves the projections of all keys, and scores are products over W instead of D.
    """
    heads = q.shape[1]
    return len(q) < len(keys) and len(q) * (heads - 1) < keys.shape[1] * sequences


def absorbed_attention(
    q: Tensor,
    keys: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    kind: AttentionKind = SOFTMAX,
    limits: Tensor | None = None,
) -> Tensor:
    """Attention of queries (Nq, H, D) to keys (Nk, W) without projecting the keys.

    q . (W_k x) is (W_k^T q) . x and the sum of a (W_v x) is W_v times the sum of a x, so that the
    projections (W, W) of keys and values are applied to the queries and to the result (as in the
    latent attention of DeepSeek-V2, 2405.04434). All heads of a query read the same keys.
    """
    heads, head_dim = q.shape[1:]
    by_head = heads, head_dim, keys.shape[1]
    queries = torch.einsum("qhd,hdw->qhw", q, k_weight.view(by_head)).reshape(-1, 1, by_head[2])
    attended = attention(
        queries,
        rows := keys[:, None],
        rows,
        q_offsets * heads,
        kv_offsets,
        replace(kind, score_scale=kind.resolve_score_scale(head_dim)),
        limits=None if limits is None else limits.repeat_interleave(heads),
    )
    return torch.einsum(
        "qhw,hdw->qhd", attended.view(-1, heads, by_head[2]), v_weight.view(by_head)
    )


class Attention(nn.Module):
    """Multi-head attention from queries (Nq, W) to keys (Nk, W) of the same sequence.

    With a `query_width` Q the queries and the result are (Nq, Q).
    """

    def __init__(self, width: int, heads: int, query_width: int | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(query_width or width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, query_width or width)

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
        if absorbs_projections(q, keys, len(q_offsets) - 1):
            attended = absorbed_attention(
                q, keys, self.k.weight, self.v.weight, q_offsets, kv_offsets, kind, limits
            )
        else:
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
