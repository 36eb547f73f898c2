"""Candidates of a request look at what belongs to it. R requests, C candidates, L seen, W width."""

import torch
from torch import Tensor, nn

UNSEEN = -1e9  # of a score: weightless beside any other, and no NaN where nothing is seen


class Seen(nn.Module):
    """Keys and values of what is seen: computed once, whatever is asked of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (R, L, W) to keys and values of the same shape."""
        return self.k(tokens), self.v(tokens)


class Look(nn.Module):
    """From each candidate to all that its request has (DIN's idea, with dot products).

    Queries start with the projection of the keys, so that like items match from the start.
    """

    def __init__(self, seen: Seen, heads: int) -> None:
        super().__init__()
        width = seen.k.in_features
        self.heads = heads
        self.q = nn.Linear(width, width, bias=False)
        self.q.weight.data.copy_(seen.k.weight.data)
        self.out = nn.Linear(width, width)

    def forward(self, candidates: Tensor, keys: Tensor, values: Tensor, there: Tensor) -> Tensor:
        """Candidates (R, C, W), keys and values (R, L, W), `there` (R, C or 1, L) to (R, C, W).

        Zeros where nothing is there.
        """
        q, k, v = (self._split(x) for x in (self.q(candidates), keys, values))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        scores = torch.where(there[:, None], scores, UNSEEN)
        found = torch.softmax(scores, -1) @ v
        some = there.any(2, keepdim=True).float()
        return some * self.out(found.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        """(R, n, W) to (R, H, n, W / H)."""
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)
