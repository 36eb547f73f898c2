"""Attention to the events that share an attribute with a candidate (SIM, 2006.05639).

Also embeddings of the recency features that features/recency.py defines. B candidates, N events of
R requests, M matching events, G groups, T event types (column 0 of T + 1 is the unknown one), W
width, d row width, H heads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from features.recency import (
    AGE_BUCKETS,
    MAX_LOG_PHASE,
    NO_EVENT_AGE,
    PHASE_BUCKETS,
    RecencyFeatures,
)
from training.data.matching import AttributeMatches, AttributeRecency, MatchedGaps
from training.model.history.events import age_bucket
from training.model.running_statistics import RunningStatistics
from training.model.sequence.attention import split_heads
from training.ops.attention import dispatch
from training.ops.ragged import QueryKeyPairs


class MatchedAttention(nn.Module):
    """Attention of each candidate to its matching events."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(
        self, candidates: Tensor, events: Tensor, matches: AttributeMatches, pairs: QueryKeyPairs
    ) -> Tensor:
        """Candidates (B, W) and the events of `matches` (M, W) to (B, W); `pairs` are theirs."""
        q = split_heads(self.q(candidates.index_select(0, matches.candidates)), self.heads)
        k, v = split_heads(self.k(events), self.heads), split_heads(self.v(events), self.heads)
        attended = dispatch.segment_attention(q, k, v, pairs)
        rows = self.out(attended.flatten(1))
        return torch.empty_like(candidates).index_copy(0, matches.candidates, rows)


USER_VALUE_SLOTS = 2**16


class InterArrivalStats(RunningStatistics):
    """Mean time between two events of a type with items of one attribute value, over all users.

    The sums are accumulated in training from the histories of the batches, so they contain no
    events later than the latest example so far; within a day batches are shuffled, so those of an
    example may contain later events of other users. A gap is added once, by the first request that
    sees its end, although all later requests of the user have it in their histories:
    `counted_until` is the time of the latest request that was counted, by hash of user and
    attribute value. Of two requests of a batch with the same hash the later one is counted. Users
    and values that share a hash may lose gaps, but add none twice; so may requests in another order
    than their times, if the later history was cut to its most recent events.
    """

    total_span: Tensor
    gap_count: Tensor
    counted_until: Tensor

    def __init__(self, num_values: int, num_types: int) -> None:
        super().__init__()
        self.num_types = num_types
        self.register_buffer("total_span", torch.zeros(num_values, num_types, dtype=torch.float64))
        self.register_buffer("gap_count", torch.zeros(num_values, num_types, dtype=torch.float64))
        self.register_buffer("counted_until", torch.zeros(USER_VALUE_SLOTS, dtype=torch.int64))

    def forward(self, values: Tensor) -> Tensor:
        """Mean gaps in seconds (…, T + 1) of attribute values (…); 0 if none was observed."""
        return (self.total_span[values] / self.gap_count[values].clamp(min=1)).float()

    def update(self, gaps: MatchedGaps) -> None:
        """Add the gaps in the matching events of a batch that no earlier request has seen."""
        slot = gaps.user_values % len(self.counted_until)
        seen_from = torch.where(_is_latest(slot, gaps.as_of), self.counted_until[slot], gaps.as_of)
        is_new = gaps.end_time >= seen_from[gaps.group]
        cell = gaps.values[gaps.group] * self.num_types + gaps.type
        self.total_span.view(-1).index_add_(0, cell, (gaps.seconds * is_new).double())
        self.gap_count.view(-1).index_add_(0, cell, is_new.double())
        self.counted_until.scatter_reduce_(0, slot, gaps.as_of, "amax")

    @override
    def increments(self) -> list[Tensor]:
        """The gaps that were added, and their sums."""
        names = "total_span", "gap_count"
        return [self.get_buffer(name) - self._base(name) for name in names]

    @override
    def add(self, increments: Sequence[Tensor]) -> None:
        """Add the gaps of all processes, which read different users."""
        for name, added in zip(("total_span", "gap_count"), increments, strict=True):
            self.get_buffer(name).copy_(self._base(name) + added)

    @override
    def maxima(self) -> list[Tensor]:
        """The time until which gaps were counted."""
        return [self.counted_until]


def _is_latest(slot: Tensor, time: Tensor) -> Tensor:
    """Whether each element (G) is the latest of its slot; one of those at the same time is."""
    by_time = time.argsort(stable=True)
    order = by_time[slot[by_time].argsort(stable=True)]
    is_last = torch.ones_like(order, dtype=torch.bool)
    is_last[:-1] = slot[order][1:] != slot[order][:-1]
    return torch.empty_like(is_last).index_copy(0, order, is_last)


class RecencyEmbedding(nn.Module):
    """Rows, one for each event type, that embed when the user last had a matching event.

    Attention must learn to select the last of many events before it can learn from its age; here
    the age itself is the input, over the whole history. Two more embeddings, initialized with
    zeros, are added: of the age relative to the mean gap between two such events of the user, and
    relative to the mean gap of all users. They capture periodic behavior.
    """

    def __init__(self, num_values: int, types: int, width: int) -> None:
        super().__init__()
        self.num_types = types + 1
        self.age_embedding = nn.Embedding(self.num_types * (AGE_BUCKETS + 1), width)
        nn.init.normal_(self.age_embedding.weight, std=0.05)
        self.user_phase = nn.Embedding(self.num_types * (PHASE_BUCKETS + 1), width)
        self.population_phase = nn.Embedding(self.num_types * (PHASE_BUCKETS + 1), width)
        nn.init.zeros_(self.user_phase.weight)
        nn.init.zeros_(self.population_phase.weight)
        self.inter_arrival = InterArrivalStats(num_values, self.num_types)

    def forward(self, recency: AttributeRecency) -> Tensor:
        """Rows of the candidates (B, T, d); training adds their gaps to those of all users."""
        if self.training:
            self.inter_arrival.update(recency.gaps)
        rows = self.embed(recency.features, recency.values)[:, 1:]
        return rows.index_select(0, recency.candidate_group)

    def embed(self, recency: RecencyFeatures[Tensor], values: Tensor) -> Tensor:
        """Recency (…, T + 1) with items of attribute values (…) to rows (…, T + 1, d)."""
        last_age = recency.last_age
        age = torch.where(last_age < NO_EVENT_AGE, age_bucket(last_age), AGE_BUCKETS)
        user = phase_bucket(last_age, recency.span / recency.gap_count.clamp(min=1))
        population = phase_bucket(last_age, self.inter_arrival(values))
        slot = torch.arange(self.num_types, device=age.device)
        rows: Tensor = (
            self.age_embedding(age + slot * (AGE_BUCKETS + 1))
            + self.user_phase(user + slot * (PHASE_BUCKETS + 1))
            + self.population_phase(population + slot * (PHASE_BUCKETS + 1))
        )
        return rows


def phase_bucket(last_age: Tensor, gap: Tensor) -> Tensor:
    """Bucket of the age of the last event relative to a mean gap, both in seconds."""
    ratio = torch.log(last_age / gap.clamp(min=1.0)).clamp(-MAX_LOG_PHASE, MAX_LOG_PHASE - 1e-4)
    bucket = ((ratio + MAX_LOG_PHASE) * (PHASE_BUCKETS / (2 * MAX_LOG_PHASE))).long()
    return torch.where((gap > 0) & (last_age < NO_EVENT_AGE), bucket, PHASE_BUCKETS)
