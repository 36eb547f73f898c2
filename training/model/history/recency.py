"""Embeddings of the recency features that features/recency.py defines.

B candidates, N events, G groups of candidates that share an attribute value, T event types, d row
width. Column 0 of T + 1 is the unknown event type.
"""

import torch
from torch import Tensor, nn

from features.recency import (
    AGE_BUCKETS,
    MAX_LOG_PHASE,
    NO_EVENT_AGE,
    PHASE_BUCKETS,
    RecencyFeatures,
)
from training.model.history.events import age_bucket
from training.model.history.search import AttributeMatches
from training.ops.ragged import segment_ids


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


class InterArrivalStats(nn.Module):
    """Mean time between two events of a type with items of one attribute value, over all users.

    The sums are accumulated in training from the histories of the batches, so they contain no
    events later than the examples.
    """

    total_span: Tensor
    gap_count: Tensor

    def __init__(self, num_values: int, num_types: int) -> None:
        super().__init__()
        self.register_buffer("total_span", torch.zeros(num_values, num_types, dtype=torch.float64))
        self.register_buffer("gap_count", torch.zeros(num_values, num_types, dtype=torch.float64))

    def forward(self, values: Tensor, recency: RecencyFeatures[Tensor]) -> Tensor:
        """Mean gaps in seconds (…, T + 1) of attribute values (…); 0 if none was observed."""
        if self.training:
            self._accumulate(values, recency)
        return (self.total_span[values] / self.gap_count[values].clamp(min=1)).float()

    def _accumulate(self, values: Tensor, recency: RecencyFeatures[Tensor]) -> None:
        num_types = self.total_span.shape[1]
        rows = values.flatten()
        self.total_span.index_add_(0, rows, recency.span.double().view(-1, num_types))
        self.gap_count.index_add_(0, rows, recency.gap_count.double().view(-1, num_types))


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

    def forward(self, matches: AttributeMatches, types: Tensor, ages: Tensor) -> Tensor:
        """Types and ages in seconds of the events (N) to rows of the candidates (B, T, d)."""
        recency = recency_features(matches, types, ages, self.num_types)
        return self.embed(recency, matches.attribute_values)[matches.candidate_group, 1:]

    def embed(self, recency: RecencyFeatures[Tensor], values: Tensor) -> Tensor:
        """Recency (…, T + 1) with items of attribute values (…) to rows (…, T + 1, d)."""
        last_age = recency.last_age
        age = torch.where(last_age < NO_EVENT_AGE, age_bucket(last_age), AGE_BUCKETS)
        user = phase_bucket(last_age, recency.span / recency.gap_count.clamp(min=1))
        population = phase_bucket(last_age, self.inter_arrival(values, recency))
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
