"""Which of a user's events a candidate is shown (SIM's hard search, 2006.05639).

B candidates, N events of R requests, G groups, W width, H heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.data.batch import Batch
from training.model.sequence.attention import heads_of
from training.ops.attention import pairs
from training.ops.ragged import group_of_each, newest, runs


@dataclass(frozen=True)
class Matches:
    """Candidates of one request that share an attribute form a group, with the events that do too.

    `candidates` (B) and `events` (M) are positions, group by group, events oldest first;
    `q_offsets` and `kv_offsets` (G+1) cut them; `group_of` (B) is the group of each candidate, and
    `values` (G) the attribute that its members share.
    """

    candidates: Tensor
    q_offsets: Tensor
    events: Tensor
    kv_offsets: Tensor
    group_of: Tensor
    values: Tensor

    def newest(self, most: int) -> "Matches":
        """The same groups with the last `most` events of each."""
        at, kv_offsets = newest(self.kv_offsets, most)
        return replace(self, events=self.events[at], kv_offsets=kv_offsets)


def match(own: Tensor, seen: Tensor, request: Tensor, offsets: Tensor) -> Matches:
    """Groups by the attribute `own` (B) of candidates and `seen` (N) of events; 0 matches nothing.

    `request` (B) is each candidate's request, `offsets` (R+1) cut the events into requests.
    """
    span = 1 + int(torch.cat((own, seen)).max())
    event_key, by_event = (group_of_each(offsets) * span + seen).sort(stable=True)
    key, by_candidate = (request * span + own).sort(stable=True)
    groups, group, counts = torch.unique_consecutive(key, return_inverse=True, return_counts=True)
    first = torch.searchsorted(event_key, groups)
    stop = torch.searchsorted(event_key, groups, right=True)
    stop = torch.where(groups % span == 0, first, stop)
    at, kv_offsets = runs(first, stop - first)
    group_of = torch.empty_like(group).index_copy(0, by_candidate, group)
    q_offsets = F.pad(counts.cumsum(0), (1, 0))
    values = groups % span
    return Matches(by_candidate, q_offsets, by_event[at], kv_offsets, group_of, values)


@dataclass(frozen=True)
class Found:
    """The events that a model reads: `positions` (P) of each family's newest, then of each match.

    `offsets` (R+1) cut a family's newest into requests. Of all `matches` only what is in `read` is
    attended to; when the others were is known all the same.
    """

    positions: Tensor
    offsets: tuple[Tensor, ...]
    matches: tuple[Matches, ...]
    read: tuple[Matches, ...]

    def split(self, events: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Something of the events read (P, …) as that of each family and of each match."""
        own = [int(offsets[-1]) for offsets in self.offsets]
        parts = list(events.split([*own, *(len(m.events) for m in self.read)]))
        return parts[: len(own)], parts[len(own) :]


@dataclass(frozen=True)
class Sought:
    """The newest events of some types, by code; of all where there are none."""

    most: int
    types: tuple[int, ...] = ()


def find(batch: Batch, attributes: Sequence[str], families: Sequence[Sought], most: int) -> Found:
    """The newest events of each family, and those like a candidate in each attribute.

    At most `most` of those of a candidate are read.
    """
    history = batch.history
    own = [history.newest(sought.most, sought.types) for sought in families]
    matches = tuple(
        match(batch.row_ids[name], history.item_ids[name], batch.request, history.offsets)
        for name in attributes
    )
    read = tuple(m.newest(most) for m in matches)
    positions = [*(at for at, _ in own), *(m.events for m in read)]
    return Found(torch.cat(positions), tuple(offsets for _, offsets in own), matches, read)


class MatchedAttention(nn.Module):
    """A candidate attends to its matching events."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, candidates: Tensor, found: Tensor, matches: Matches) -> Tensor:
        """Candidates (B, W) and the events of `matches` (M, W) to (B, W)."""
        q = heads_of(self.q(candidates[matches.candidates]), self.heads)
        k, v = heads_of(self.k(found), self.heads), heads_of(self.v(found), self.heads)
        attended = pairs.attention(q, k, v, matches.q_offsets, matches.kv_offsets).flatten(1)
        return torch.empty_like(candidates).index_copy(0, matches.candidates, self.out(attended))
