"""The events of a batch that a model reads: the latest ones, and those that match a candidate.

Everything whose size depends on the values of a batch is computed here, once, in the process that
reads the batch, and shipped with it: the step of the trainer then has no value to wait for. B
candidates, N events of R requests, of which P are read, G groups.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from training.data.batch import Batch
from training.data.matching import (
    AttributeMatches,
    AttributeRecency,
    attribute_recency,
    match_batch,
)
from training.data.tensor_fields import TensorFields
from training.ops.ragged import QueryKeyPairs, query_key_pairs, segment_offsets


class SelectedEvents(NamedTuple):
    """Values of the events that are read (n, …): of each event group, and of each match."""

    by_event_group: list[Tensor]
    by_match: list[Tensor]


@dataclass(frozen=True)
class HistorySelection(TensorFields):
    """The events read by a model.

    Attributes:
        positions: The events that are read (P): those of each event group, then those of `matches`.
        event_groups: The latest events of each event group, as positions (n).
        event_group_offsets: Offsets (R + 1) that cut them into requests.
        matches: The most recent events that match a candidate, by similarity attribute.
        match_pairs: The pairs of a candidate and an event in `matches`.
        target_pairs: The pairs of a candidate and an event of each event group, for DIN's
            activation unit; empty for other attention.
        recency: The recency of all matching events, by similarity attribute.
    """

    positions: Tensor
    event_groups: tuple[Tensor, ...]
    event_group_offsets: tuple[Tensor, ...]
    matches: tuple[AttributeMatches, ...]
    match_pairs: tuple[QueryKeyPairs, ...]
    target_pairs: tuple[QueryKeyPairs, ...]
    recency: tuple[AttributeRecency, ...]

    def split_events(self, values: Tensor) -> SelectedEvents:
        """Split values (P, …) of the events that are read by event group and by match."""
        group_sizes = [len(positions) for positions in self.event_groups]
        match_sizes = [len(matches.events) for matches in self.matches]
        parts = list(torch.split(values, group_sizes + match_sizes))
        return SelectedEvents(parts[: len(group_sizes)], parts[len(group_sizes) :])


@dataclass(frozen=True)
class EventFilter:
    """Selects the most recent `max_events` events of some types, by code; of all types if empty."""

    max_events: int
    event_types: tuple[int, ...] = ()


@dataclass(frozen=True)
class TargetPairing:
    """Pairs each candidate with the events of its sequence, which ends with `cls_tokens` more.

    Candidates share the sequence of their request unless they have `own_sequences`.
    """

    cls_tokens: int
    own_sequences: bool

    def __call__(self, request: Tensor, offsets: Tensor) -> QueryKeyPairs:
        """Pairs of candidates (B), sorted by `request` (B), and events cut by `offsets` (R + 1)."""
        q_offsets = segment_offsets(request, len(offsets) - 1)
        if self.own_sequences:
            offsets = F.pad(offsets.diff()[request].cumsum(0), (1, 0))
            q_offsets = torch.arange(len(offsets), device=offsets.device)
        added = self.cls_tokens * torch.arange(len(offsets), device=offsets.device)
        return query_key_pairs(q_offsets, offsets + added)


@dataclass(frozen=True)
class HistorySelector:
    """Selects the events that a model reads; the configuration of that, without any weights.

    Attributes:
        attributes: Similarity attributes.
        event_filters: The most recent events of each event group.
        max_matched_events: Events that are attended to of those that match a candidate.
        num_types: Event types, with the unknown one.
        target_pairing: Pairs candidates and events; None for attention that needs no pairs.
    """

    attributes: tuple[str, ...]
    event_filters: tuple[EventFilter, ...]
    max_matched_events: int
    num_types: int
    target_pairing: TargetPairing | None = None

    def __call__(self, batch: Batch) -> HistorySelection:
        """Select the events of a batch."""
        history = batch.history
        newest = [
            history.latest(events.max_events, events.event_types) for events in self.event_filters
        ]
        all_matches = [match_batch(batch, name) for name in self.attributes]
        attended = tuple(matches.keep_latest(self.max_matched_events) for matches in all_matches)
        event_groups = tuple(positions for positions, _ in newest)
        pair = self.target_pairing
        return HistorySelection(
            positions=torch.cat((*event_groups, *(matches.events for matches in attended))),
            event_groups=event_groups,
            event_group_offsets=tuple(offsets for _, offsets in newest),
            matches=attended,
            match_pairs=tuple(query_key_pairs(m.q_offsets, m.kv_offsets) for m in attended),
            target_pairs=(
                tuple(pair(batch.request_index, offsets) for _, offsets in newest) if pair else ()
            ),
            recency=tuple(attribute_recency(m, batch, self.num_types) for m in all_matches),
        )

    def attach(self, batch: Batch) -> Batch:
        """The batch with the events that a model reads."""
        return replace(batch, selection=self(batch))
