"""GEM, the foundation model over all surfaces: a batch and its embeddings to logits.

B rows (candidates), R requests, d row width, O objectives, E embedding width, M MLP width.
"""

import sys
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from etl.errors import UserError
from features.schema import ITEM_TABLE, USER_TABLE, FeatureSchema
from training.data.batch import Batch
from training.model.config import GemConfig
from training.model.embeddings import EmbeddingVectors, GroupedFeatureRows, NumericEmbedding
from training.model.heads import (
    DomainGate,
    EsmmChain,
    SurfaceHeads,
    ZilnDistribution,
    ZilnValueHead,
)
from training.model.history.encoder import HistoryEncoder
from training.model.history.events import TypeMeanSimilarity, TypeSimilarity
from training.model.history.search import HistorySelection
from training.model.interaction import build_interaction

NORM_EPS = 1e-2  # large, so that LayerNorm does not amplify barely trained rows


@dataclass(frozen=True)
class GemOutput:
    """What GEM returns for a batch.

    Attributes:
        logits: Logit (B, O) of each objective on the row's surface.
        embedding: Compact representation (B, E) of user and item, before the surface gate.
        hidden: The MLP layer (B, M) that `embedding` is computed from.
        value_distribution: Distribution of outcome values, if the model has a value head.
        next_action_loss: Loss of the auxiliary next-item task, in training and if enabled.
    """

    logits: Tensor
    embedding: Tensor
    hidden: Tensor
    value_distribution: ZilnDistribution | None
    next_action_loss: Tensor | None


class Gem(nn.Module):
    """The dense part of GEM; its inputs include the looked-up embedding vectors."""

    def __init__(self, features: FeatureSchema, config: GemConfig) -> None:
        super().__init__()
        d = config.embedding_dim
        self.features = features
        self._build_categorical(features, config)
        self.history = HistoryEncoder(features, config, 1 + self.user_ids.rows)
        self.type_similarities = nn.ModuleList(
            TypeMeanSimilarity(name, width, len(features.events), d)
            for name, width in features.item.vectors.items()
        )
        self.content_projections = nn.ModuleDict(
            {name: nn.Linear(width, d) for name, width in features.item.vectors.items()}
        )
        self.surface = nn.Embedding(len(features.surfaces) + 1, d)
        self.candidate_numeric = NumericEmbedding(
            len(features.numeric_columns), config.numeric_rows, d, config.mlp_width
        )
        self.user_numeric = NumericEmbedding(
            len(features.user.numeric), 1, d, config.mlp_width // 4
        )
        self.norm = nn.LayerNorm(d, eps=NORM_EPS)
        self.interaction = build_interaction(self._num_interaction_rows(config), config)
        self.trunk = nn.Sequential(
            nn.Linear(self.interaction.out_rows * d + self._wide_dim(), config.mlp_width),
            nn.LayerNorm(config.mlp_width),
            nn.ReLU(),
            nn.Dropout(config.dropout),
        )
        self.embedding = nn.Linear(config.mlp_width, config.output_embedding_dim)
        self.gate = DomainGate(len(features.surfaces), config.output_embedding_dim)
        self.heads = SurfaceHeads(
            len(features.surfaces), len(features.objectives), config.output_embedding_dim
        )
        self.esmm = EsmmChain(features.objectives, config.esmm_parents)
        self.value_head = build_value_head(features, config) if config.value_loss_weight else None

    def _build_categorical(self, features: FeatureSchema, config: GemConfig) -> None:
        user = dict(features.user.categorical)
        if config.user_hash_buckets:
            user = {USER_TABLE: config.user_hash_buckets} | user
        # The item table grows over time: it always counts as high-cardinality.
        candidate = {ITEM_TABLE: sys.maxsize} | features.item.categorical
        candidate |= features.context.categorical
        self.user_ids, self.candidate_ids = (
            GroupedFeatureRows(
                cardinalities,
                width=config.embedding_dim,
                threshold=config.low_cardinality_threshold,
                shared_rows=config.low_cardinality_rows,
            )
            for cardinalities in (user, candidate)
        )

    def _num_interaction_rows(self, config: GemConfig) -> int:
        """Number of rows that the interaction module reads; see `forward`."""
        vectors, types = len(self.features.item.vectors), len(self.features.events)
        user = self.user_ids.rows + 1  # numeric features of a user are one row
        candidate = self.candidate_ids.rows + vectors + 1 + config.numeric_rows  # 1: the surface
        history = self.history.request_rows + self.history.candidate_rows
        return user + candidate + history + vectors * types

    def _wide_dim(self) -> int:
        """Width of the features that bypass the interaction module; see `forward`."""
        f = self.features
        vectors = sum(width + len(f.events) for width in f.item.vectors.values())
        return len(f.numeric_columns) + len(f.user.numeric) + vectors

    def select_history(self, batch: Batch) -> HistorySelection:
        """Select the events of a batch that the model reads."""
        return self.history.select_history(batch)

    def forward(
        self, batch: Batch, selection: HistorySelection, vectors: EmbeddingVectors
    ) -> GemOutput:
        """Outputs for all rows; request-level parts are computed once per request."""
        user_numeric = self.user_numeric(batch.user_numeric)
        numeric = self.candidate_numeric(batch.row_numeric)
        user_rows = torch.stack((*self.user_ids(vectors.users), user_numeric.rows[:, 0]), 1)
        history = self.history(batch, selection, vectors, user_rows)
        similarities = [
            cast("TypeSimilarity", similarity(batch)) for similarity in self.type_similarities
        ]
        rows = torch.cat(
            (
                torch.cat((user_rows, history.request_rows), 1)[batch.request_index],
                self._candidate_rows(batch, vectors),
                numeric.rows,
                history.candidate_rows,
                *(similarity.rows for similarity in similarities),
            ),
            1,
        )
        # Interaction modules take (rows, B, d).
        x = self.interaction(self.norm(rows).transpose(0, 1).contiguous()).transpose(0, 1)
        wide = (
            numeric.standardized,
            user_numeric.standardized[batch.request_index],
            *batch.row_vectors.values(),
            *(similarity.scores for similarity in similarities),
        )
        hidden = self.trunk(torch.cat((x.flatten(1), *wide), 1))
        embedding = self.embedding(hidden)
        gated = self.gate(embedding, batch.surface)
        return GemOutput(
            logits=self.esmm(self.heads(gated, batch.surface)),
            embedding=embedding,
            hidden=hidden,
            value_distribution=self.value_head(gated) if self.value_head else None,
            next_action_loss=history.next_action_loss,
        )

    def _candidate_rows(self, batch: Batch, vectors: EmbeddingVectors) -> Tensor:
        """Rows (B, n, d) of a candidate's ids, content vectors and surface."""
        ids = self.candidate_ids(vectors.candidates)
        content = [self.content_projections[name](v) for name, v in batch.row_vectors.items()]
        return torch.stack((*ids, *content, self.surface(batch.surface)), 1)


def build_value_head(features: FeatureSchema, config: GemConfig) -> ZilnValueHead:
    """Head for outcome values. Raises UserError if no objective of the spec has values."""
    if not features.value_objectives:
        raise UserError("--model.value-loss-weight: no objective of the spec has `value: true`")
    return ZilnValueHead(config.output_embedding_dim, len(features.objectives))
