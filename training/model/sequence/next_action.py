"""Auxiliary task: predict the item of a user's next event. N events of R requests, W width."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.model.sequence.pyramid import EncodedEvents

MAX_SAMPLES = 512  # sampled events per batch, which are negatives of each other


def sample_followed_events(offsets: Tensor, max_samples: int = MAX_SAMPLES) -> Tensor:
    """Positions (n) of at most `max_samples` random events with a successor in their request."""
    is_offset = torch.zeros(int(offsets[-1]) + 1, dtype=torch.bool, device=offsets.device)
    is_offset[offsets] = True
    followed = (~is_offset[1:]).nonzero().flatten()
    if len(followed) <= max_samples:
        return followed
    return followed[torch.randperm(len(followed), device=followed.device)[:max_samples]]


class NextActionLoss(nn.Module):
    """Sampled softmax over next items: the item that follows an event, among those of other events.

    The generative task of HSTU (2402.17152, section 2) as an auxiliary loss of ranking. The encoder
    must be causal.
    """

    def __init__(self, width: int, event_width: int) -> None:
        super().__init__()
        self.query_projection = nn.Linear(event_width, width, bias=False)

    def forward(
        self,
        encoded: EncodedEvents,
        positions: Tensor,
        offsets: Tensor,
        next_item_ids: Tensor,
        next_item_vectors: Tensor,
    ) -> Tensor:
        """Mean loss of the events at `positions` (n).

        Args:
            encoded: The encoded sequences, which may end with CLS tokens.
            positions: Positions of the events in the sequences without CLS tokens.
            offsets: Offsets (R + 1) of the sequences without CLS tokens.
            next_item_ids: The item (n) of each following event; equal items are not negatives.
            next_item_vectors: Vectors (n, W) of those items.
        """
        request = torch.searchsorted(offsets, positions, right=True) - 1
        events = encoded.events[positions - offsets[request] + encoded.offsets[request]]
        queries = self.query_projection(events)
        scores = queries @ next_item_vectors.T / next_item_vectors.shape[1] ** 0.5
        same_item = (next_item_ids[:, None] == next_item_ids).fill_diagonal_(False)
        target = torch.arange(len(positions), device=positions.device)
        return F.cross_entropy(scores.masked_fill(same_item, -torch.inf), target)
