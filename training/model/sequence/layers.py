"""Sequence layers, and feed-forward layers whose weights are generated from non-sequence rows.

N events of R requests, n rows of a request, W width, H heads, m hidden width.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.model.sequence.attention import RotaryAngles, SelfAttention, split_heads
from training.ops.attention import AttentionKind, attention


class TransformerLayer(nn.Module):
    """Pre-norm transformer layer with causal self-attention: S + MHA(LN(S)), then + FFN(LN(.))."""

    def __init__(self, width: int, heads: int, window: int | None, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads, window)
        self.ffn = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, width)
        )

    def forward(
        self, events: Tensor, offsets: Tensor, rotary: RotaryAngles | None = None
    ) -> Tensor:
        """(N, W) to (N, W)."""
        events = events + self.attention(self.norm(events), offsets, rotary)
        out: Tensor = events + self.ffn(events)
        return out


class HstuLayer(nn.Module):
    """S + (LN(A V) * U) W_o, with [U, V, Q, K] = SiLU(LN(S) W) and A = SiLU(Q K^T) / n.

    HSTU (2402.17152, section 3.2), with `RotaryTimeEncoding` in place of the biases of position and
    time. n is the constant `max_length`, so that scores do not depend on the length of the history.
    """

    def __init__(self, width: int, heads: int, window: int | None, max_length: int) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.attention_kind = AttentionKind(
            "silu", causal=True, score_scale=1.0, weight_scale=1 / (window or max_length)
        )
        self.norm, self.attention_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.uvqk = nn.Linear(width, 4 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(
        self, events: Tensor, offsets: Tensor, rotary: RotaryAngles | None = None
    ) -> Tensor:
        """(N, W) to (N, W)."""
        u, v, q, k = F.silu(self.uvqk(self.norm(events))).chunk(4, 1)
        q, k, v = (split_heads(x, self.heads) for x in (q, k, v))
        if rotary:
            q, k = rotary(q), rotary(k)
        attended = attention(q, k, v, offsets, offsets, self.attention_kind, self.window)
        out: Tensor = events + self.out(self.attention_norm(attended.flatten(1)) * u)
        return out


class PersonalizedFFN(nn.Module):
    """S W(X) with W(X) = X^T V in (W, W), a matrix for each request (PFFN, InterFormer 2411.09852).

    S X^T V is attention without softmax: the n rows of X are the keys, and V their values.
    """

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.randn(rows, width) * rows**-0.5)
        self.attention_kind = AttentionKind("identity", score_scale=width**-0.5)

    def forward(self, events: Tensor, offsets: Tensor, rows: Tensor) -> Tensor:
        """Events (N, W) and rows (R, n, W) to (N, W)."""
        values = self.values.expand_as(rows)
        return _attend(events, rows, values, offsets, 1, self.attention_kind)


class KeysValues(NamedTuple):
    """Keys and values (R, m, W) of each request."""

    keys: Tensor
    values: Tensor


class Gdpa(nn.Module):
    """Generalized dot-product attention, act(S K(X)^T) V(X) in each head (Kunlun, 2602.10016).

    Equals a personalized two-layer feed-forward net act(S A(X)) C(X) of hidden width m, with the m
    columns of A(X) as keys and the m rows of C(X) as values.
    """

    def __init__(self, rows: int, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.hidden = heads, hidden
        self.key_generator = nn.Linear(rows, hidden, bias=False)
        self.value_generator = nn.Linear(rows, hidden, bias=False)
        self.key_projection = nn.Linear(width, width, bias=False)
        self.value_projection = nn.Linear(width, width, bias=False)
        self.attention_kind = AttentionKind("gelu", weight_scale=hidden**-0.5)

    def forward(self, events: Tensor, offsets: Tensor, rows: Tensor) -> Tensor:
        """Events (N, W) and rows (R, n, W) to (N, W)."""
        keys, values = self.generate_keys_values(rows)
        return _attend(events, keys, values, offsets, self.heads, self.attention_kind)

    def generate_keys_values(self, rows: Tensor) -> KeysValues:
        """Keys and values generated from rows (R, n, W)."""
        by_width = rows.transpose(1, 2)
        keys = self.key_projection(self.key_generator(by_width).transpose(1, 2))
        values = self.value_projection(self.value_generator(by_width).transpose(1, 2))
        return KeysValues(keys, values)


def _attend(
    events: Tensor, keys: Tensor, values: Tensor, offsets: Tensor, heads: int, kind: AttentionKind
) -> Tensor:
    """Attention of events (N, W) to the keys and values (R, m, W) of their request."""
    requests, m, _ = keys.shape
    kv_offsets = torch.arange(requests + 1, device=keys.device) * m
    q, k, v = (split_heads(x, heads) for x in (events, keys.flatten(0, 1), values.flatten(0, 1)))
    return attention(q, k, v, offsets, kv_offsets, kind).flatten(1)
