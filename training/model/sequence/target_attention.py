"""Attention of candidates to the events of their requests.

N events of R requests, B candidates, P pairs of a candidate and an event, W width, H heads, D = W /
H width of a head, I item width, h hidden width.
"""

from torch import Tensor, nn

from training.model.sequence.attention import Attention, split_heads
from training.ops.attention import AttentionKind, attention
from training.ops.ragged import QueryKeyPairs, segment_offsets


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
        q_offsets = candidate_offsets(request, offsets)
        attended: Tensor = self.attention(candidates, events, q_offsets, offsets, limits=limits)
        return attended


class ActivationUnitAttention(nn.Module):
    """sum_s a(x, e_s) e_s with a(q, k) = MLP([q ; k ; q - k ; q * k]), as in DIN (1706.06978).

    The weights are not normalized, so that the sum grows with the number of relevant events
    (section 4.3). The first layer is linear in q and k, so it is computed once for each candidate
    and event, and only that of their product for each pair; q - k adds no freedom to it.
    """

    def __init__(self, width: int, hidden: int = 36) -> None:
        super().__init__()
        self.candidate = nn.Linear(width, hidden)
        self.event = nn.Linear(width, hidden, bias=False)
        self.product = nn.Linear(width, hidden, bias=False)
        self.unit = nn.Sequential(nn.PReLU(), nn.Linear(hidden, 1))

    def forward(self, candidates: Tensor, events: Tensor, pairs: QueryKeyPairs) -> Tensor:
        """Candidates (B, W), and events (N, W) with which they are paired, to (B, W)."""
        event = events[pairs.key]
        hidden = self.candidate(candidates)[pairs.query] + self.event(events)[pairs.key]
        weight = self.unit(hidden + self.product(candidates[pairs.query] * event))
        weighted = weight * event
        sums: Tensor = weighted.new_zeros(candidates.shape).index_add(0, pairs.query, weighted)
        return sums


def candidate_offsets(request: Tensor, offsets: Tensor) -> Tensor:
    """Offsets (R + 1) that cut candidates, sorted by `request` (B), into requests."""
    return segment_offsets(request, len(offsets) - 1)


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
        q_offsets = candidate_offsets(request, offsets)
        sums = attention(q, k, v, q_offsets, offsets, AttentionKind("identity"), limits=limits)
        out: Tensor = self.out(sums.flatten(1) / (limits + PRIOR_EVENTS)[:, None])
        return out
