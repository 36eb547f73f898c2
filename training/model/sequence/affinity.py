"""How well a user took to what is like the candidate. N events, B candidates, I item width.

W event width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.model.sequence.attention import heads_of
from training.ops.attention import Kind, attention

FAINT = 1e-2  # variance of an item's rows below which it is hardly like anything yet
PRIOR = 5.0  # events of no value, so that few events tell little


class Affinity(nn.Module):
    """sum_s (K x . K x_s) V e_s / (n + 5): linear attention, queries and keys of items alone.

    With labels in the events e this is a kernel regression: the first step of the posterior of a
    user's tastes. A softmax can't be it, for its weights are never negative: that who dislikes
    the opposite likes this is lost.
    """

    def __init__(self, items: int, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(items, eps=FAINT)
        self.key = nn.Linear(items, width, bias=False)
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
        q, k = (heads_of(self.key(self.norm(x)), self.heads) for x in (candidates, items))
        v = heads_of(self.value(events), self.heads)
        counts = torch.bincount(request, minlength=len(offsets) - 1)
        q_offsets = F.pad(counts.cumsum(0), (1, 0))
        sums = attention(q, k, v, q_offsets, offsets, Kind("identity"), limits=limits)
        return self.out(sums.flatten(1) / (limits + PRIOR)[:, None])
