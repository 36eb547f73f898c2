"""An auxiliary task: which item did a user deal with next? N events of R requests, W width."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.model.sequence.level import Encoded

MOST = 512  # events of a batch that are asked, and what each is told from


def followed(offsets: Tensor, most: int = MOST) -> Tensor:
    """Positions (n) of events that are not the last of their request, `most` of them by chance."""
    last = torch.zeros(int(offsets[-1]) + 1, dtype=torch.bool, device=offsets.device)
    last[offsets] = True
    found = (~last[1:]).nonzero().flatten()
    if len(found) <= most:
        return found
    return found[torch.randperm(len(found), device=found.device)[:most]]


class NextAction(nn.Module):
    """Each event tells the next one's item from those of other events (sampled softmax).

    The generative task of HSTU (2402.17152, section 2) as a helper of ranking: encoders learn from
    what users did, not from labels alone. The encoder must not see ahead.
    """

    def __init__(self, width: int, own: int) -> None:
        super().__init__()
        self.ask = nn.Linear(own, width, bias=False)

    def forward(
        self, encoded: Encoded, at: Tensor, offsets: Tensor, ids: Tensor, items: Tensor
    ) -> Tensor:
        """The mean loss of events at some positions (n), by the `ids` (n) of what came next.

        `items` (n, W) are the vectors of those; `offsets` (R+1) are of the events alone, behind
        which `encoded` may hold learned rows.
        """
        request = torch.searchsorted(offsets, at, right=True) - 1
        own = encoded.events[at - offsets[request] + encoded.offsets[request]]
        scores = self.ask(own) @ items.T / items.shape[1] ** 0.5
        same = (ids[:, None] == ids).fill_diagonal_(False)
        truth = torch.arange(len(at), device=at.device)
        return F.cross_entropy(scores.masked_fill(same, -torch.inf), truth)
