"""Events that share an attribute with a candidate (SIM, 2006.05639), and how recent they are.

Everything here depends on a batch alone and has sizes that depend on its values: it is computed in
the process that reads the batch. B candidates, N events of R requests, M matching events, G groups,
T event types (column 0 of T + 1 is the unknown one).
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from features.recency import NO_EVENT_AGE, RecencyFeatures
from training.data.batch import Batch
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

    def keep_latest(self, max_events: int) -> "AttributeMatches":
        """The same groups with only the most recent `max_events` events of each."""
        latest = last_positions(self.kv_offsets, max_events)
        return replace(self, events=self.events[latest.positions], kv_offsets=latest.offsets)


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


def match_batch(batch: Batch, attribute: str) -> AttributeMatches:
    """Match the candidates of a batch and all events of their requests by an attribute."""
    return match_by_attribute(
        batch.row_categorical[attribute],
        batch.history.item_categorical[attribute],
        batch.request_index,
        batch.history.offsets,
    )


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


@dataclass(frozen=True)
class MatchedGaps:
    """Times between two successive matching events of one type of a group (K).

    Attributes:
        group: Group of the events (K).
        type: Type of the events (K).
        seconds: Length of the gap (K).
        end_time: When the later event became visible (K).
        values: Attribute value of each group (G).
        user_values: Hash of the user and the attribute value of each group (G).
        as_of: Time of each group's request (G).
    """

    group: Tensor
    type: Tensor
    seconds: Tensor
    end_time: Tensor
    values: Tensor
    user_values: Tensor
    as_of: Tensor


def matched_gaps(matches: AttributeMatches, batch: Batch, num_types: int) -> MatchedGaps:
    """All gaps between the matching events of each group; `num_types` with the unknown type."""
    history = batch.history
    request = batch.request_index[matches.candidates[matches.q_offsets[:-1]]]
    as_of = batch.as_of[request]
    types, ages = history.types[matches.events], history.age_seconds[matches.events]
    cell = segment_ids(matches.kv_offsets) * num_types + types
    by_age = ages.argsort(descending=True, stable=True)
    order = by_age[cell[by_age].argsort(stable=True)]
    cell, ages = cell[order], ages[order]
    exists = cell[1:] == cell[:-1]
    group = cell[1:][exists] // num_types
    return MatchedGaps(
        group=group,
        type=cell[1:][exists] % num_types,
        seconds=(ages[:-1] - ages[1:])[exists],
        end_time=as_of[group] - ages[1:][exists],
        values=matches.attribute_values,
        user_values=batch.user_hash[request] * 1_000_003 + matches.attribute_values,
        as_of=as_of,
    )


@dataclass(frozen=True)
class AttributeRecency:
    """When the users last had events that match a candidate, and the gaps between them.

    `features` and `values` are of the groups (G), `candidate_group` (B) is the group of each
    candidate; see `AttributeMatches`.
    """

    features: RecencyFeatures[Tensor]
    values: Tensor
    candidate_group: Tensor
    gaps: MatchedGaps


def attribute_recency(matches: AttributeMatches, batch: Batch, num_types: int) -> AttributeRecency:
    """The recency of all matching events of a batch; `num_types` with the unknown type."""
    history = batch.history
    return AttributeRecency(
        features=recency_features(matches, history.types, history.age_seconds, num_types),
        values=matches.attribute_values,
        candidate_group=matches.candidate_group,
        gaps=matched_gaps(matches, batch, num_types),
    )
