"""A candidate looks at its request's history. N events of R requests, B candidates, W width."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.model.sequence.attention import Attention


class TargetAttention(nn.Module):
    """From each candidate to all events of its request (DIN's idea, with dot products).

    Queries and keys start with the same projection, so that like items match from the start.
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

        With `limits` (B) a candidate sees the first so many events of its request.
        """
        counts = torch.bincount(request, minlength=len(offsets) - 1)
        q_offsets = F.pad(counts.cumsum(0), (1, 0))
        return self.attention(candidates, events, q_offsets, offsets, limits=limits)
