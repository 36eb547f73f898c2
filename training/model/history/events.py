"""Events as tokens, and the similarity of a candidate to the mean item of each event type.

B candidates, N events of R requests, of which P are read, T event types, d width of an embedding
table or of a row, V width of a content vector, W width of a token.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from features.recency import AGE_BUCKETS, AGE_BUCKETS_PER_E_FOLD
from training.data.batch import Batch, History
from training.model.sequence.summaries import MaskNet
from training.ops.ragged import segment_ids

DWELL_BUCKETS = 128


def age_bucket(seconds: Tensor) -> Tensor:
    """Logarithmic bucket of an age in seconds; features/recency.py defines it."""
    steps = torch.log(seconds.clamp(min=1).float()) * AGE_BUCKETS_PER_E_FOLD
    return steps.long().clamp(max=AGE_BUCKETS - 1)


class EventTokenizer(nn.Module):
    """Embeds events: item, event type, surface, dwell time, age and attributes to tokens (N, W)."""

    def __init__(
        self,
        tables: int,
        table_width: int,
        vector_width: int,
        surfaces: int,
        types: int,
        width: int,
    ) -> None:
        super().__init__()
        self.attributes = nn.ModuleDict()
        self.surface = nn.Embedding(surfaces + 1, width)
        self.action = nn.Embedding(types + 1, width)
        self.dwell = nn.Embedding(DWELL_BUCKETS, width)
        self.age = nn.Embedding(AGE_BUCKETS, width)
        self.item_projection = nn.Linear(tables * table_width + vector_width, width)
        self.mlp = self._build_mlp(width)
        self.norm = nn.LayerNorm(width)

    def add_attributes(self, embedding_rows: Mapping[str, int]) -> None:
        """Also read attributes of events; their embeddings start from zero."""
        width = self.surface.embedding_dim
        for name, num_rows in embedding_rows.items():
            embedding = nn.Embedding(num_rows, width)
            nn.init.zeros_(embedding.weight)
            self.attributes[name] = embedding

    def _build_mlp(self, width: int) -> nn.Module:
        return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU())

    def forward(self, history: History, vectors: dict[str, Tensor], positions: Tensor) -> Tensor:
        """Tokens (P, W) of the events at `positions` (P).

        `vectors` are the embeddings (P, d) of their items, by table.
        """
        item_vectors = {name: v[positions] for name, v in history.item_vectors.items()}
        item = self.item_projection(concat_item_vectors(vectors, item_vectors))
        for name, embedding in self.attributes.items():
            item = item + embedding(history.attributes[name][positions])
        return self.embed(
            item,
            history.types[positions],
            history.surfaces[positions],
            history.dwells[positions],
            history.age_seconds[positions],
        )

    def embed(
        self, projected_items: Tensor, types: Tensor, surfaces: Tensor, dwells: Tensor, ages: Tensor
    ) -> Tensor:
        """Tokens (…, W) of projected items (…, W), event types, surfaces, dwells and ages (…)."""
        token = projected_items + self.action(types)
        token = token + self.surface(surfaces) + self.dwell(dwells)
        token = token + self.age(age_bucket(ages))
        embedded: Tensor = self.norm(token + self.mlp(token))
        return embedded


class MaskNetTokenizer(EventTokenizer):
    """Event tokens made by MaskNet of item, event type, surface, dwell time and age."""

    @override
    def _build_mlp(self, width: int) -> nn.Module:
        return MaskNet(attributes=5, width=width)

    @override
    def embed(
        self, projected_items: Tensor, types: Tensor, surfaces: Tensor, dwells: Tensor, ages: Tensor
    ) -> Tensor:
        """Tokens (…, W) of projected items (…, W), event types, surfaces, dwells and ages (…)."""
        attributes = (
            projected_items,
            self.action(types),
            self.surface(surfaces),
            self.dwell(dwells),
            self.age(age_bucket(ages)),
        )
        embedded: Tensor = self.norm(projected_items + self.mlp(torch.cat(attributes, -1)))
        return embedded


def concat_item_vectors(
    table_vectors: dict[str, Tensor], content_vectors: dict[str, Tensor]
) -> Tensor:
    """Concatenated embeddings and content vectors of items (n, tables * d + sum of V)."""
    in_order = [table_vectors[name] for name in sorted(table_vectors)]
    return torch.cat([*in_order, *content_vectors.values()], 1)


PRIOR_EVENTS = 3.0  # zero vectors added to each mean, to shrink means of few events


class TypeSimilarity(NamedTuple):
    """`rows` (B, T, d) for the interaction module, and the dot products `scores` (B, T)."""

    rows: Tensor
    scores: Tensor


class TypeMeanSimilarity(nn.Module):
    """Products of a candidate's content vector with the mean vector of each event type.

    Softmax attention shows which past items are similar to the candidate, but not their number,
    because its weights sum to one (DIN omits the normalization for this reason, 1706.06978, section
    4.3). A weighted mean over the whole history keeps the number, at the cost of one pass.
    """

    def __init__(self, vector_name: str, vector_width: int, types: int, width: int) -> None:
        super().__init__()
        self.vector_name = vector_name
        self.num_types = types + 1
        self.dwell_log_weight = nn.Parameter(torch.zeros(DWELL_BUCKETS))
        self.age_log_weight = nn.Parameter(torch.zeros(AGE_BUCKETS))
        self.project = nn.Linear(vector_width, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, batch: Batch) -> TypeSimilarity:
        """Similarity of each candidate to the mean item of each event type."""
        means = self.project(self.type_means(batch.history))[batch.request_index]
        products = self.project(batch.row_vectors[self.vector_name])[:, None] * means
        return TypeSimilarity(self.out(products), products.sum(2))

    def type_means(self, history: History) -> Tensor:
        """Mean vectors (R, T, V) by event type, weighted by dwell and age of the events."""
        vectors, requests = history.item_vectors[self.vector_name], len(history.offsets) - 1
        cell = segment_ids(history.offsets, len(history.types)) * self.num_types + history.types
        # On CUDA the gradient of an embedding is many times faster than that of an index.
        weight = torch.exp(
            F.embedding(history.dwells, self.dwell_log_weight[:, None])
            + F.embedding(age_bucket(history.age_seconds), self.age_log_weight[:, None])
        )
        weighted = torch.cat((vectors * weight, weight), 1)
        sums = weighted.new_zeros(requests * self.num_types, weighted.shape[1])
        sums = sums.index_add(0, cell, weighted)
        means = sums[:, :-1] / (sums[:, -1:] + PRIOR_EVENTS)
        return means.view(requests, self.num_types, -1)[:, 1:]
