"""Search of a history for events that share an attribute with a candidate (SIM, 2006.05639).

Also embeddings of the recency features that features/recency.py defines. B candidates, N events of
R requests, of which P are read, M matching events, G groups, T event types (column 0 of T + 1
is the unknown one), W width, d row width, H heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from features.recency import (
    AGE_BUCKETS,
    MAX_LOG_PHASE,
    NO_EVENT_AGE,
    PHASE_BUCKETS,
    RecencyFeatures,
)
from training.data.batch import Batch, History
from training.model.history.events import age_bucket
from training.model.sequence.attention import split_heads
from training.ops.attention import dispatch
from training.ops.ragged import concat_ranges, last_positions, segment_ids


@dataclass(frozen=True)
class AttributeMatches:
    """Groups of candidates of one request with the same attribute value, and their matching events.

    `candidates` (B) and `events` (M) are positions, group by group, events oldest first;
    `q_offsets` and `kv_offsets` (G + 1) cut them into groups. `candidate_group` (B) is the group of
    each candidate, `attribute_values` (G) is the value that a group shares.
    """

    candidates: Tensor
    q_offsets: Tensor
    events: Tensor
    kv_offsets: Tensor
    candidate_group: Tensor
    attribute_values: Tensor

    def keep_newest(self, max_events: int) -> "AttributeMatches":
        """The same groups with only the most recent `max_events` events of each."""
        newest = last_positions(self.kv_offsets, max_events)
        return replace(self, events=self.events[newest.positions], kv_offsets=newest.offsets)


def match_by_attribute(
    candidate_values: Tensor, event_values: Tensor, request: Tensor, offsets: Tensor
) -> AttributeMatches:
    """Match candidates and events of the same request by an attribute; value 0 matches nothing.

    Args:
        candidate_values: Attribute value of each candidate (B).
        event_values: Attribute value of each event (N).
        request: Request of each candidate (B).
        offsets: Offsets (R + 1) that cut the events into requests.
    """
    # A key is unique for (request, value), so that one sort and one binary search match all.
    stride = 1 + int(torch.cat((candidate_values, event_values)).max())
    event_key, event_order = (segment_ids(offsets) * stride + event_values).sort(stable=True)
    candidate_key, candidate_order = (request * stride + candidate_values).sort(stable=True)
    group_key, sorted_group, group_size = torch.unique_consecutive(
        candidate_key, return_inverse=True, return_counts=True
    )
    attribute_values = group_key % stride
    start = torch.searchsorted(event_key, group_key)
    stop = torch.searchsorted(event_key, group_key, right=True)
    stop = torch.where(attribute_values == 0, start, stop)
    matching = concat_ranges(start, stop - start)
    return AttributeMatches(
        candidates=candidate_order,
        q_offsets=F.pad(group_size.cumsum(0), (1, 0)),
        events=event_order[matching.positions],
        kv_offsets=matching.offsets,
        candidate_group=torch.empty_like(sorted_group).index_copy(0, candidate_order, sorted_group),
        attribute_values=attribute_values,
    )


class SelectedEvents(NamedTuple):
    """Values of the events that are read (n, …): of each event group, and of each match."""

    by_event_group: list[Tensor]
    by_match: list[Tensor]


@dataclass(frozen=True)
class HistorySelection:
    """The events read by a model.

    `positions` (P) are those of the latest events of each event group, cut into requests by its
    `event_group_offsets` (R + 1), followed by those of `attended_matches`. `all_matches` are not
    cut to the most recent: recency features need the types and ages of all of them.
    """

    positions: Tensor
    event_group_offsets: tuple[Tensor, ...]
    all_matches: tuple[AttributeMatches, ...]
    attended_matches: tuple[AttributeMatches, ...]

    def split_events(self, values: Tensor) -> SelectedEvents:
        """Split values (P, …) of the events that are read by event group and by match."""
        group_sizes = [int(offsets[-1]) for offsets in self.event_group_offsets]
        match_sizes = [len(matches.events) for matches in self.attended_matches]
        parts = list(torch.split(values, group_sizes + match_sizes))
        return SelectedEvents(parts[: len(group_sizes)], parts[len(group_sizes) :])


@dataclass(frozen=True)
class EventFilter:
    """Selects the most recent `max_events` events of some types, by code; of all types if empty."""

    max_events: int
    event_types: tuple[int, ...] = ()


def select_history(
    batch: Batch,
    attributes: Sequence[str],
    event_filters: Sequence[EventFilter],
    max_matched_events: int,
) -> HistorySelection:
    """Select the events of a batch that a model reads.

    Selects the most recent events of each filter, and for each attribute the most recent
    `max_matched_events` events that share its value with a candidate.
    """
    history = batch.history
    newest = [history.latest(events.max_events, events.event_types) for events in event_filters]
    all_matches = tuple(
        match_by_attribute(
            batch.row_categorical[name],
            history.item_categorical[name],
            batch.request_index,
            history.offsets,
        )
        for name in attributes
    )
    attended = tuple(matches.keep_newest(max_matched_events) for matches in all_matches)
    positions = [positions for positions, _ in newest]
    positions += [matches.events for matches in attended]
    return HistorySelection(
        positions=torch.cat(positions),
        event_group_offsets=tuple(offsets for _, offsets in newest),
        all_matches=all_matches,
        attended_matches=attended,
    )


class MatchedAttention(nn.Module):
    """Attention of each candidate to its matching events."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, candidates: Tensor, events: Tensor, matches: AttributeMatches) -> Tensor:
        """Candidates (B, W) and the events of `matches` (M, W) to (B, W)."""
        q = split_heads(self.q(candidates[matches.candidates]), self.heads)
        k, v = split_heads(self.k(events), self.heads), split_heads(self.v(events), self.heads)
        attended = dispatch.segment_attention(q, k, v, matches.q_offsets, matches.kv_offsets)
        rows = self.out(attended.flatten(1))
        return torch.empty_like(candidates).index_copy(0, matches.candidates, rows)


def recency_features(
    matches: AttributeMatches, types: Tensor, ages: Tensor, num_types: int
) -> RecencyFeatures[Tensor]:
    """Recency of the matching events of each group (G, num_types).

    `types` and `ages` (N) are of all events of the batch; ages are in seconds.
    """
    groups = len(matches.kv_offsets) - 1
    cell = segment_ids(matches.kv_offsets) * num_types + types[matches.events]
    matched_ages, cells = ages[matches.events], groups * num_types
    last = torch.full((cells,), NO_EVENT_AGE, dtype=ages.dtype, device=ages.device)
    last = last.scatter_reduce(0, cell, matched_ages, "amin")
    first = torch.zeros_like(last).scatter_reduce(0, cell, matched_ages, "amax")
    gap_count = (torch.bincount(cell, minlength=cells) - 1).clamp(min=0)
    span = torch.where(gap_count > 0, first - last, 0)
    shape = groups, num_types
    return RecencyFeatures(last.view(shape), span.view(shape), gap_count.view(shape))


class MatchedGaps(NamedTuple):
    """Times between matching events of a group and a type, one for each two neighbors (K).

    Where `exists` is false, the neighbors are of different groups or types. `seconds` is the gap,
    `end_age` the age of the event at its end.
    """

    group: Tensor
    type: Tensor
    seconds: Tensor
    end_age: Tensor
    exists: Tensor


def matched_gaps(matches: AttributeMatches, history: History, num_types: int) -> MatchedGaps:
    """All gaps between the matching events of each group; `num_types` with the unknown type."""
    types, ages = history.types[matches.events], history.age_seconds[matches.events]
    cell = segment_ids(matches.kv_offsets) * num_types + types
    by_age = ages.argsort(descending=True, stable=True)
    order = by_age[cell[by_age].argsort(stable=True)]
    cell, ages = cell[order], ages[order]
    return MatchedGaps(
        group=cell[1:] // num_types,
        type=cell[1:] % num_types,
        seconds=ages[:-1] - ages[1:],
        end_age=ages[1:],
        exists=cell[1:] == cell[:-1],
    )


USER_VALUE_SLOTS = 2**16


class InterArrivalStats(nn.Module):
    """Mean time between two events of a type with items of one attribute value, over all users.

    The sums are accumulated in training from the histories of the batches, so they contain no
    events later than the examples. A gap is added once, by the first request that sees its end,
    although all later requests of the user have it in their histories: `counted_until` is the time
    of the latest request that was counted, by hash of user and attribute value. Of two requests of
    a batch with the same hash the later one is counted. Users and values that share a hash may lose
    gaps, but add none twice; so may requests in another order than their times, if the later
    history was cut to its most recent events.
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

    def update(self, matches: AttributeMatches, batch: Batch) -> None:
        """Add the gaps in the matching events of a batch that no earlier request has seen."""
        values = matches.attribute_values
        request = batch.request_index[matches.candidates[matches.q_offsets[:-1]]]
        as_of = batch.as_of[request]
        slot = (batch.user_hash[request] * 1_000_003 + values) % len(self.counted_until)
        gaps = matched_gaps(matches, batch.history, self.num_types)
        seen_from = torch.where(_is_latest(slot, as_of), self.counted_until[slot], as_of)
        is_new = gaps.exists & (as_of[gaps.group] - gaps.end_age >= seen_from[gaps.group])
        cell = values[gaps.group] * self.num_types + gaps.type
        self.total_span.view(-1).index_add_(0, cell, (gaps.seconds * is_new).double())
        self.gap_count.view(-1).index_add_(0, cell, is_new.double())
        self.counted_until.scatter_reduce_(0, slot, as_of, "amax")


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

    def forward(self, matches: AttributeMatches, batch: Batch) -> Tensor:
        """Rows of the candidates (B, T, d); training adds their gaps to those of all users."""
        if self.training:
            self.inter_arrival.update(matches, batch)
        history = batch.history
        recency = recency_features(matches, history.types, history.age_seconds, self.num_types)
        return self.embed(recency, matches.attribute_values)[matches.candidate_group, 1:]

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
