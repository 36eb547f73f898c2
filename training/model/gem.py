"""GEM, the foundation model over all surfaces: a batch and its embeddings to logits.

B rows (candidates), R requests, d row width, O objectives, A auxiliary objectives, E embedding
width, M MLP width.
"""

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from etl.errors import UserError
from features.schema import ITEM_TABLE, USER_TABLE, FeatureSchema
from training.data.batch import Batch, InputStatistics
from training.data.history_selection import HistorySelection
from training.model.alignment import Layout, RowAlignment
from training.model.config import GemConfig, GemOptions
from training.model.embeddings import (
    EmbeddingVectors,
    GroupedFeatureRows,
    NarrowEmbeddings,
)
from training.model.experts import build_experts, expert_width
from training.model.heads import (
    DomainGate,
    EsmmChain,
    ObjectiveTowers,
    ZilnDistribution,
    ZilnValueHead,
)
from training.model.history.encoder import HistoryEncoder
from training.model.history.events import TypeMeanSimilarity, TypeSimilarity
from training.model.hyformer import HyFormer
from training.model.interaction import Interaction, build_interaction
from training.model.low_precision import harden_gates, remove_biases
from training.model.numeric import InputScale, NumericEmbedding
from training.model.trunk import build_trunk

CANDIDATE = "candidate|"  # prefix of the names of rows of a candidate's ids
ANY_USER = "any user"  # name of the row of all users, if the spec has no features of users
CONTENT = "content|{}"  # name of the row of a vector feature
NORM_EPS = 1e-2  # large, so that LayerNorm does not amplify barely trained rows


@dataclass(frozen=True)
class GemOutput:
    """What GEM returns for a batch.

    Attributes:
        logits: Logit (B, O) of each objective on the row's surface.
        auxiliary: Predictions (B, A) of auxiliary objectives: logits, or ln(1 + seconds of dwell).
        hidden: The last hidden layer (B, M) before the surface gate.
        value_distribution: Distribution of outcome values, if the model has a value head.
        next_action_loss: Loss of the next-item task in training, if enabled; not for padding.
    """

    logits: Tensor
    auxiliary: Tensor
    hidden: Tensor
    value_distribution: ZilnDistribution | None
    next_action_loss: Tensor | None


class Gem(nn.Module):
    """The dense part of GEM; its inputs include the looked-up embedding vectors."""

    def __init__(
        self, features: FeatureSchema, config: GemConfig, layout: Layout | None = None
    ) -> None:
        """Build the model.

        Args:
            features: What the model reads.
            config: Its modules and sizes.
            layout: The rows that a model was trained on that this one continues, if they may
                differ from those of `features`.
        """
        super().__init__()
        d = config.embedding_dim
        self.features = features
        self.auxiliary_objectives = auxiliary_objectives(features, config)
        self._build_categorical(features, config, layout)
        user_rows = (
            *self.user_ids.row_names,
            *(["numbers|user"] if features.user.numeric else []),
            *map(CONTENT.format, features.user.vectors),
        )
        self.any_user: nn.Parameter | None = None
        if not user_rows or (layout and ANY_USER in layout["user"]):
            self.any_user = nn.Parameter(0.05 * torch.randn(d))
            user_rows = (ANY_USER, *user_rows)
        self.user_alignment = RowAlignment(user_rows, layout["user"] if layout else user_rows)
        candidate_rows = self._candidate_row_names()
        self.candidate_alignment = RowAlignment(
            candidate_rows, layout["candidate"] if layout else candidate_rows
        )
        self.history = HistoryEncoder(
            features, config, self.user_alignment.out_rows, self.candidate_alignment.out_rows
        )
        self.type_similarities = nn.ModuleList(
            TypeMeanSimilarity(name, width, len(features.events), d)
            for name, width in features.item.vectors.items()
        )
        widths = features.item.vectors | features.user.vectors | features.context.vectors
        self.content_projections = nn.ModuleDict(
            {name: nn.Linear(width, d) for name, width in widths.items()}
        )
        self.surface = nn.Embedding(len(features.surfaces) + 1, d)
        self.candidate_numeric, self.user_numeric = (
            NumericEmbedding(groups, d, config.numeric_segments, config.numeric_scale_lr_factor)
            for groups in (features.numeric_keys, (USER_TABLE,) * len(features.user.numeric))
        )
        self.norm = nn.LayerNorm(d, eps=NORM_EPS)
        all_rows = (*user_rows, *self._other_row_names())
        self.row_alignment = RowAlignment(all_rows, layout["interaction"] if layout else all_rows)
        self.interaction: Interaction | HyFormer = (
            HyFormer(self.row_alignment.out_rows, self.history.sequence_widths, config)
            if config.interaction == "hyformer"
            else build_interaction(self.row_alignment.out_rows, config)
        )
        self._build_outputs(features, config)
        if not config.linear_biases:
            remove_biases(self)
        if config.hard_gates:
            harden_gates(self)

    def _build_outputs(self, features: FeatureSchema, config: GemConfig) -> None:
        """The layers behind the interaction module."""
        hidden = config.mlp_width
        inputs = self.interaction.out_rows * config.embedding_dim + self._wide_dim()
        self.trunk_scale = (
            InputScale(inputs, config.trunk_scale_lr_factor)
            if config.trunk_scale_lr_factor
            else nn.Identity()
        )
        widths = [hidden] * config.trunk_layers
        self.trunk = build_trunk(inputs, widths, config.dropout, config.trunk_norm)
        self.embedding = nn.Linear(hidden, config.output_embedding_dim)
        self.gate = DomainGate(len(features.surfaces), hidden)
        outputs = len(features.objectives) + len(self.auxiliary_objectives)
        self.experts = build_experts(outputs, config)
        self.heads = ObjectiveTowers(
            len(features.surfaces),
            outputs,
            (expert_width(config) if self.experts else hidden) + config.output_embedding_dim,
            config.tower_width,
        )
        self.esmm = EsmmChain(features.objectives, config.esmm_parents)
        self.value_head = build_value_head(features, config) if config.value_loss_weight else None

    def _build_categorical(
        self, features: FeatureSchema, config: GemConfig, layout: Layout | None
    ) -> None:
        groups = (features.user, features.item, features.context)
        self.narrow_embeddings = NarrowEmbeddings(
            {name: rows for group in groups for name, rows in group.categorical.items()},
            config.embedding_dim,
            config.embedding_width_factor,
        )
        user = dict(features.user.categorical)
        if config.user_hash_buckets:
            user = {USER_TABLE: config.user_hash_buckets} | user
        trained_user = trained_candidate = None
        if layout:
            trained_user = layout["user"]
            trained_candidate = [
                name.removeprefix(CANDIDATE)
                for name in layout["candidate"]
                if name.startswith(CANDIDATE)
            ]
        # The item table grows over time: it always counts as high-cardinality.
        candidate = {ITEM_TABLE: sys.maxsize} | features.item.categorical
        candidate |= features.context.categorical
        self.user_ids, self.candidate_ids = (
            GroupedFeatureRows(
                cardinalities,
                width=config.embedding_dim,
                threshold=config.low_cardinality_threshold,
                shared_rows=config.low_cardinality_rows,
                trained_rows=trained,
            )
            for cardinalities, trained in ((user, trained_user), (candidate, trained_candidate))
        )

    def _candidate_row_names(self) -> tuple[str, ...]:
        """Names of the rows of a candidate's own features: ids, content, surface, numbers."""
        return (
            *(CANDIDATE + name for name in self.candidate_ids.row_names),
            *map(CONTENT.format, self.features.item.vectors),
            "surface",
            *map(CONTENT.format, self.features.context.vectors),
            *(f"numbers|of {' '.join(key)}" for key in dict.fromkeys(self.features.numeric_keys)),
        )

    def _other_row_names(self) -> list[str]:
        """Names of the rows that the interaction module reads after the user's; see `forward`."""
        requests, candidates = self.history.row_names
        return [
            *requests,
            *self._candidate_row_names(),
            *candidates,
            *(
                f"similarity|{name}|{event}"
                for name in self.features.item.vectors
                for event in self.features.events
            ),
        ]

    def _wide_dim(self) -> int:
        """Width of the features that bypass the interaction module; see `forward`."""
        f = self.features
        vectors = sum(width + len(f.events) for width in f.item.vectors.values())
        vectors += sum(f.user.vectors.values()) + sum(f.context.vectors.values())
        return len(f.numeric_columns) + len(f.user.numeric) + vectors

    @property
    def layout(self) -> Layout:
        """The rows that its modules are trained on, to build a model that continues this one."""
        return {
            "user": self.user_alignment.trained_names,
            "candidate": self.candidate_alignment.trained_names,
            "interaction": self.row_alignment.trained_names,
        }

    def initialize_from(self, statistics: InputStatistics) -> None:
        """Set the edges of numeric encodings, and start from the objectives' base rates."""
        self.fit_numbers(statistics, self.features.all_numeric_columns)
        is_dwell = torch.tensor([t == "dwell" for t in self.auxiliary_objectives.values()]).bool()
        means = statistics.auxiliary_means
        auxiliary = torch.where(is_dwell, means, torch.logit(means))
        initial = self.esmm.initial_logits(statistics.base_rates)
        self.heads.start_from(torch.cat((initial, auxiliary)))

    def fit_numbers(self, statistics: InputStatistics, columns: Collection[str]) -> None:
        """Set the edges of the numeric encodings of some columns."""
        features = self.features
        for module, names, values in (
            (self.candidate_numeric, features.numeric_columns, statistics.row_numeric),
            (self.user_numeric, features.user.numeric, statistics.user_numeric),
        ):
            positions = [number for number, name in enumerate(names) if name in columns]
            module.encoding.fit(values, positions)

    def select_history(self, batch: Batch) -> HistorySelection:
        """The events of a batch that the model reads, as its reader selected them if it did."""
        if isinstance(batch.selection, HistorySelection):
            return batch.selection
        return self.history.select_history(batch)

    def forward(
        self, batch: Batch, selection: HistorySelection, vectors: EmbeddingVectors
    ) -> GemOutput:
        """Outputs for all rows; request-level parts are computed once per request."""
        vectors = vectors.map(self.narrow_embeddings)
        user_numeric = self.user_numeric(batch.user_numeric)
        numeric = self.candidate_numeric(batch.row_numeric)
        user_rows = self._user_rows(batch, vectors, user_numeric.rows)
        candidate_rows = torch.cat((self._candidate_rows(batch, vectors), numeric.rows), 1)
        history = self.history(
            batch,
            selection,
            vectors,
            self.user_alignment(user_rows.transpose(0, 1)).transpose(0, 1),
            self.candidate_alignment(candidate_rows.transpose(0, 1)).transpose(0, 1),
        )
        similarities = [
            cast("TypeSimilarity", similarity(batch)) for similarity in self.type_similarities
        ]
        rows = torch.cat(
            (
                torch.cat((user_rows, history.request_rows), 1)[batch.request_index],
                candidate_rows,
                history.candidate_rows,
                *(similarity.rows for similarity in similarities),
            ),
            1,
        )
        # Interaction modules take (rows, B, d).
        x = self.row_alignment(self.norm(rows).transpose(0, 1).contiguous())
        if isinstance(self.interaction, HyFormer):
            x = self.interaction(x, history.sequences).transpose(0, 1)
        else:
            x = self.interaction(x).transpose(0, 1)
        wide = (
            numeric.standardized,
            user_numeric.standardized[batch.request_index],
            *batch.row_vectors.values(),
            *(similarity.scores for similarity in similarities),
            *(values[batch.request_index] for values in batch.user_vectors.values()),
            *batch.context_vectors.values(),
        )
        trunk: Tensor = self.trunk(self.trunk_scale(torch.cat((x.flatten(1), *wide), 1)))
        hidden = trunk.to(rows.dtype)  # under autocast, heads are in fp32
        embedding = self.embedding(hidden)
        gated = self.gate(hidden, batch.surface)
        outputs = self.heads(self._tower_inputs(gated, embedding), batch.surface)
        num_objectives = len(self.features.objectives)
        return GemOutput(
            logits=self.esmm(outputs[:, :num_objectives]),
            auxiliary=outputs[:, num_objectives:],
            hidden=hidden,
            value_distribution=(
                self.value_head(torch.cat((gated, embedding), 1)) if self.value_head else None
            ),
            next_action_loss=history.next_action_loss,
        )

    def _tower_inputs(self, gated: Tensor, embedding: Tensor) -> Tensor:
        """What the towers read: (B, M + E), or with experts (B, O + A, W + E)."""
        if self.experts is None:
            return torch.cat((gated, embedding), 1)
        mixtures: Tensor = self.experts(gated)
        return torch.cat((mixtures, embedding[:, None].expand(-1, mixtures.shape[1], -1)), 2)

    def _user_rows(self, batch: Batch, vectors: EmbeddingVectors, numeric: Tensor) -> Tensor:
        """Rows (R, n, d) of users: ids, numbers and vectors; one of any user if there are none."""
        rows = [
            *self.user_ids(vectors.users),
            *numeric.unbind(1),
            *self._content_rows(batch.user_vectors),
        ]
        if self.any_user is not None:
            rows = [self.any_user.expand(len(batch.as_of), -1), *rows]
        return torch.stack(rows, 1)

    def _candidate_rows(self, batch: Batch, vectors: EmbeddingVectors) -> Tensor:
        """Rows (B, n, d) of a candidate's ids, vectors of the item, surface and context."""
        ids = self.candidate_ids(vectors.candidates)
        content = self._content_rows(batch.row_vectors)
        context = self._content_rows(batch.context_vectors)
        return torch.stack((*ids, *content, self.surface(batch.surface), *context), 1)

    def _content_rows(self, vectors: Mapping[str, Tensor]) -> list[Tensor]:
        """A row (n, d) for each vector feature."""
        return [self.content_projections[name](values) for name, values in vectors.items()]


def auxiliary_objectives(features: FeatureSchema, config: GemOptions) -> dict[str, str]:
    """The target of each auxiliary objective that a model has a head for."""
    return features.auxiliary_objectives if config.auxiliary_weight else {}


def build_value_head(features: FeatureSchema, config: GemConfig) -> ZilnValueHead:
    """Head for outcome values. Raises UserError if no objective of the spec has values."""
    if not features.value_objectives:
        raise UserError("--model.value-loss-weight: no objective of the spec has `value: true`")
    return ZilnValueHead(config.mlp_width + config.output_embedding_dim, len(features.objectives))
