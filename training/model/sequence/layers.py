"""Sequence layers, and feed-forward layers whose weights are generated from non-sequence rows.

N events of R sequences, n non-sequence rows of each, W width, H heads, D = W / H width of a head, m
hidden width of a generated layer, T most events of a sequence.
"""

import torch
from torch import Tensor, nn

from training.model.config import SequenceOptions
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
    time. n is the most events that an event can attend to: `window` + 1, or `max_length` without a
    window. It is a constant, so that scores do not depend on the length of the history.
    """

    def __init__(self, width: int, heads: int, window: int | None, max_length: int) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        most_visible = max_length if window is None else window + 1
        self.attention_kind = AttentionKind(
            "silu", causal=True, score_scale=1.0, weight_scale=1 / most_visible
        )
        self.norm, self.attention_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.uvqk = nn.Linear(width, 4 * width, bias=False)
        self.activation = nn.SiLU()
        self.out = nn.Linear(width, width)

    def forward(
        self, events: Tensor, offsets: Tensor, rotary: RotaryAngles | None = None
    ) -> Tensor:
        """(N, W) to (N, W)."""
        u, v, q, k = self.activation(self.uvqk(self.norm(events))).chunk(4, 1)
        q, k, v = (split_heads(x, self.heads) for x in (q, k, v))
        if rotary:
            q, k = rotary(q), rotary(k)
        attended = attention(q, k, v, offsets, offsets, self.attention_kind, self.window)
        out: Tensor = events + self.out(self.attention_norm(attended.flatten(1)) * u)
        return out


class PersonalizedFFN(nn.Module):
    """S W(X) with a matrix W(X) = X^T V for each sequence (PFFN of InterFormer, 2411.09852).

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


class WeightGenerator(nn.Module):
    """Generates m weight vectors (R, m, W) from rows (R, n, W), as in Kunlun (2602.10016).

    Rows are combined to m rows, and an MLP is applied to each of them. The MLP makes them linearly
    independent: combinations of n rows alone would have rank n.
    """

    def __init__(self, rows: int, width: int, count: int) -> None:
        super().__init__()
        self.combine = nn.Linear(rows, count)
        self.mlp = nn.Sequential(
            nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width, bias=False)
        )

    def forward(self, rows: Tensor) -> Tensor:
        """(R, n, W) to (R, m, W)."""
        weights: Tensor = self.mlp(self.combine(rows.transpose(1, 2)).transpose(1, 2))
        return weights


class Gdpa(nn.Module):
    """Generalized dot-product attention, act(S K(X)^T) V(X) in each head (Kunlun, 2602.10016).

    Equals a personalized two-layer feed-forward net act(S A(X)) C(X) of hidden width m, with the m
    columns of A(X) as keys and the m rows of C(X) as values. `gdpa_kind` defines activation and
    scale.
    """

    def __init__(self, rows: int, width: int, heads: int, hidden: int, kind: AttentionKind) -> None:
        super().__init__()
        self.heads, self.attention_kind = heads, kind
        self.keys = WeightGenerator(rows, width, hidden)
        self.values = WeightGenerator(rows, width, hidden)

    def forward(self, events: Tensor, offsets: Tensor, rows: Tensor) -> Tensor:
        """Events (N, W) and rows (R, n, W) to (N, W)."""
        keys, values = self.keys(rows), self.values(rows)
        return _attend(events, keys, values, offsets, self.heads, self.attention_kind)


def gdpa_kind(options: SequenceOptions, max_events: int) -> AttentionKind:
    """GDPA with the length scale T = `max_events`, a constant of the configuration.

    Kunlun's paper divides scores before the activation, act(q.k / T); its published kernel scales
    weights after it (facebookresearch/ads_model_kernel_library), here act(q.k / sqrt(D)) / T.
    """
    if options.gdpa_scale == "scores":
        return AttentionKind(options.gdpa_activation, score_scale=1 / max_events)
    return AttentionKind(options.gdpa_activation, weight_scale=1 / max_events)


def _attend(
    events: Tensor, keys: Tensor, values: Tensor, offsets: Tensor, heads: int, kind: AttentionKind
) -> Tensor:
    """Attention of events (N, W) to the keys and values (R, m, W) of their sequence."""
    requests, m, _ = keys.shape
    kv_offsets = torch.arange(requests + 1, device=keys.device) * m
    q, k, v = (split_heads(x, heads) for x in (events, keys.flatten(0, 1), values.flatten(0, 1)))
    return attention(q, k, v, offsets, kv_offsets, kind).flatten(1)
