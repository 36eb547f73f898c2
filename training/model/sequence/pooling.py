"""Pooling of a sequence to a fixed number of rows. N events of R requests, W width, H heads."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.model.sequence.attention import Attention


def most_recent_events(events: Tensor, offsets: Tensor, count: int) -> Tensor:
    """The last `count` events of each request, newest first (R, count, W), padded with zeros."""
    back = torch.arange(1, count + 1, device=events.device)
    position = offsets[1:, None] - back
    exists = position >= offsets[:-1, None]
    padded = F.pad(events, (0, 0, 0, 1))
    return padded[torch.where(exists, position, len(events))]


class PmaPooling(nn.Module):
    """Pooling by multi-head attention of learned seeds (PMA of Set Transformer, 1810.00825)."""

    def __init__(self, width: int, heads: int, rows: int) -> None:
        super().__init__()
        self.seeds = nn.Parameter(torch.randn(rows, width) * width**-0.5)
        self.attention = Attention(width, heads)

    def forward(self, events: Tensor, offsets: Tensor) -> Tensor:
        """(N, W) to (R, rows, W)."""
        return attend_from_seeds(self.attention, self.seeds, events, offsets)


def attend_from_seeds(
    attention: Attention, seeds: Tensor, events: Tensor, offsets: Tensor
) -> Tensor:
    """Attention of the same seeds (n, W) to the events (N, W) of each request: (R, n, W)."""
    requests, count = len(offsets) - 1, len(seeds)
    q_offsets = torch.arange(requests + 1, device=events.device) * count
    pooled: Tensor = attention(seeds.repeat(requests, 1), events, q_offsets, offsets)
    return pooled.view(requests, count, -1)


class SumKronLinear(nn.Module):
    """sum_i Z_i^T H W_i with Z_i in (n, rows) and W_i in (W, W) (Kunlun, 2602.10016)."""

    def __init__(self, seeds: int, rows: int, width: int, terms: int = 2) -> None:
        super().__init__()
        self.z = nn.Parameter(torch.randn(terms, seeds, rows) * (terms * seeds) ** -0.5)
        self.w = nn.Parameter(torch.randn(terms, width, width) * width**-0.5)

    def forward(self, pooled: Tensor) -> Tensor:
        """(R, n, W) to (R, rows, W)."""
        return torch.einsum("tnm,rnw,twv->rmv", self.z, pooled, self.w)


class HierarchicalSeedPooling(nn.Module):
    """SumKronLinear(LN(MHA(LN(E), S, S))): many seeds E, compressed to few rows (HSP of Kunlun)."""

    def __init__(self, width: int, heads: int, rows: int, seeds_per_row: int = 8) -> None:
        super().__init__()
        seeds = rows * seeds_per_row
        self.seeds = nn.Parameter(torch.randn(seeds, width))
        self.seed_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm = nn.LayerNorm(width)
        self.compress = SumKronLinear(seeds, rows, width)

    def forward(self, events: Tensor, offsets: Tensor) -> Tensor:
        """(N, W) to (R, rows, W)."""
        seeds = self.seed_norm(self.seeds)
        pooled = attend_from_seeds(self.attention, seeds, events, offsets)
        rows: Tensor = self.compress(self.norm(pooled))
        return rows
