"""The student: a small model of a surface, in two programs.

`encode_user` runs once per request, `encode_candidates` on any number of its candidates.

R requests, L events, K earlier impressions, C candidates, T event types, W event width, H hidden
width, M similarity attributes, P counts of an event (types times decay times), O objectives, B
examples.
"""

from typing import Annotated, NamedTuple

import torch
from torch import Tensor, nn

from features.recency import RecencyFeatures
from features.schema import FeatureSchema
from ranking.inputs.arrays import (
    CandidateInputs,
    TeacherHistoryInputs,
    UserInputs,
)
from ranking.student.config import StudentConfig
from ranking.student.history import (
    DECAY_TIMES,
    DecayedMatchCounts,
    KeyValueProjection,
    TargetAttention,
    TeacherHistory,
    TeacherHistoryState,
    TypeMeanPooling,
    one_hot_types,
)
from ranking.student.position import LearnedPositionBias, PositionBias, SwapPositionBias
from ranking.student.value import ValueHead
from training.model.history.events import EventTokenizer
from training.model.history.search import RecencyEmbedding
from training.model.numeric import RunningStandardizer


class UserState(NamedTuple):
    """The state that all candidates of a request share: outputs of the user program, in order."""

    history_keys: Annotated[Tensor, "R L W"]
    history_values: Annotated[Tensor, "R L W"]
    history_mask: Annotated[Tensor, "R L"]
    type_means: Annotated[Tensor, "R T W"]
    history_similarity_ids: Annotated[Tensor, "R L M"]
    decay_weights: Annotated[Tensor, "R L P"]
    user_hidden: Annotated[Tensor, "R H"]
    teacher_history: TeacherHistoryState | None


class Student(nn.Module):
    """Features side by side, histories by attention and counts, an MLP, one logit per objective.

    Logits of `head` are for the served position; `position_bias` adds the effect of another one.
    `value_head` predicts the values of outcomes; None if no objective has values.
    The first layer is split: its user part is computed once per request. Heads that learn GEM's
    predictions are not served; they are in ranking/distillation/losses.py.
    """

    def __init__(self, features: FeatureSchema, config: StudentConfig) -> None:
        super().__init__()
        d, w, (first, second) = config.embedding_dim, config.event_width, config.hidden
        self.config = config
        self.num_types = len(features.events)
        self.num_similarity_attributes = len(features.similarity_columns)
        num_item_tables = 1 + len(features.item.categorical)
        content_width = sum(features.item.vectors.values())
        self.item_width = num_item_tables * d + content_width

        self.event_tokenizer = EventTokenizer(
            num_item_tables, d, content_width, len(features.surfaces), self.num_types, w
        )
        self.surface_embedding = nn.Embedding(len(features.surfaces) + 1, w)
        self.key_value = KeyValueProjection(w)
        self.attention = TargetAttention(self.key_value, config.heads)
        self.type_mean_pooling, self.match_counts = TypeMeanPooling(), DecayedMatchCounts()
        self.numeric_columns = [
            index
            for index, name in enumerate(features.numeric_columns)
            if not features.position or name != features.position.column
        ]
        self.candidate_standardizer = RunningStandardizer(len(self.numeric_columns))
        self.user_standardizer = RunningStandardizer(len(features.user.numeric))
        self.teacher_history: TeacherHistory | None = None
        if config.teacher_history_length:
            self.teacher_history = TeacherHistory(w, self.num_similarity_attributes, config)
        self.recency = nn.ModuleList(
            RecencyEmbedding(features.item.categorical[name], self.num_types, d)
            for name in features.similarity_columns
        )

        self.user_layer = nn.Linear(self._user_width(features), first)
        self.candidate_layer = nn.Linear(self._candidate_width(features), first)
        self.hidden = nn.Sequential(
            nn.LayerNorm(first),
            nn.ReLU(),
            nn.Dropout(config.dropout),
            nn.Linear(first, second),
            nn.ReLU(),
        )
        self.position_bias: PositionBias | None = None
        if features.position:
            has_propensity = features.position.has_propensity
            self.position_bias = (SwapPositionBias if has_propensity else LearnedPositionBias)(
                features.position.served_position, len(features.surfaces), len(features.objectives)
            )
        self.head = nn.Linear(second, len(features.objectives))
        nn.init.constant_(self.head.bias, -2.0)
        self.value_head: ValueHead | None = None
        if features.value_objectives:
            with torch.random.fork_rng(devices=()):  # other weights do not depend on this head
                columns = [features.objectives.index(name) for name in features.value_objectives]
                self.value_head = ValueHead(second, columns)

    def _user_width(self, features: FeatureSchema) -> int:
        num_tables = len(features.user.categorical) + bool(self.config.user_hash_buckets)
        width = num_tables * self.config.embedding_dim + sum(features.user.vectors.values())
        width += len(features.user.numeric)
        return width + (self.teacher_history.pooled_width if self.teacher_history else 0)

    def _candidate_width(self, features: FeatureSchema) -> int:
        d, w = self.config.embedding_dim, self.config.event_width
        context = len(features.context.categorical) * d + sum(features.context.vectors.values())
        context += len(self.numeric_columns)
        type_means = self.num_types
        match_counts = self.num_types * self.num_similarity_attributes * len(DECAY_TIMES)
        recency = self.num_similarity_attributes * self.num_types * d
        attended = self.teacher_history.attended_width if self.teacher_history else 0
        surface_and_attention = 3 * w  # surface, attended history, its product with the item
        return (
            self.item_width
            + context
            + surface_and_attention
            + type_means
            + match_counts
            + recency
            + attended
        )

    def encode_user(self, inputs: UserInputs[Tensor]) -> UserState:
        """The state that all candidates of a request share."""
        items = self.event_tokenizer.item_projection(inputs.history_items)
        type_one_hot = one_hot_types(inputs.event_types, self.num_types)
        events = self.event_tokenizer.embed(
            items,
            inputs.event_types,
            inputs.event_surfaces,
            inputs.event_dwells,
            inputs.event_age_seconds,
        )
        keys, values = self.key_value(events)
        user = [inputs.user_embeddings, _standardize(self.user_standardizer, inputs.user_numeric)]
        teacher_state = None
        if self.teacher_history is not None:
            assert inputs.teacher_history is not None
            teacher_state, pooled = self._encode_teacher_history(
                self.teacher_history, inputs.teacher_history
            )
            user += pooled
        return UserState(
            history_keys=keys,
            history_values=values,
            history_mask=inputs.event_age_seconds > 0,
            type_means=self.type_mean_pooling(
                items, type_one_hot, inputs.event_dwells, inputs.event_age_seconds
            ),
            history_similarity_ids=inputs.history_similarity_ids,
            decay_weights=self.match_counts.decay_weights(type_one_hot, inputs.event_age_seconds),
            user_hidden=self.user_layer(torch.cat(user, 1)),
            teacher_history=teacher_state,
        )

    def _encode_teacher_history(
        self, module: TeacherHistory, inputs: TeacherHistoryInputs[Tensor]
    ) -> tuple[TeacherHistoryState, list[Tensor]]:
        """The tokens that candidates attend to, and the pooled tokens (R, W) if there are any."""
        tokens = module(self.event_tokenizer.item_projection(inputs.items), inputs)
        mask = inputs.age_seconds > 0
        keys, values = module.key_value(tokens)
        state = TeacherHistoryState(keys, values, inputs.similarity_ids, mask)
        return state, module.pool(tokens, mask)

    def encode_candidates(self, user_state: UserState, inputs: CandidateInputs[Tensor]) -> Tensor:
        """The last hidden layer (R, C, H) of the candidates; `head` maps it to logits."""
        item = self.event_tokenizer.item_projection(inputs.items)
        history_mask = user_state.history_mask[:, None]
        attended = self.attention(
            item, user_state.history_keys, user_state.history_values, history_mask
        )
        attended_teacher: list[Tensor] = []
        if self.teacher_history is not None:
            assert user_state.teacher_history is not None
            attended_teacher = self.teacher_history.attend(
                item, inputs.similarity_ids, user_state.teacher_history
            )
        match_counts = self.match_counts(
            inputs.similarity_ids, user_state.history_similarity_ids, user_state.decay_weights
        )
        features = (
            inputs.items,
            inputs.context,
            _standardize(self.candidate_standardizer, inputs.numeric[..., self.numeric_columns]),
            self.surface_embedding(inputs.surfaces),
            item * attended,
            item @ user_state.type_means.transpose(1, 2),
            match_counts,
            *self._recency_embeddings(inputs),
            attended,
            *attended_teacher,
        )
        first = self.candidate_layer(torch.cat(features, 2)) + user_state.user_hidden[:, None]
        hidden: Tensor = self.hidden(first)
        return hidden

    def _recency_embeddings(self, inputs: CandidateInputs[Tensor]) -> list[Tensor]:
        """Embeddings (R, C, T * d) of the recency features, for each similarity attribute."""
        embeddings = []
        for m, recency in enumerate(self.recency):
            assert isinstance(recency, RecencyEmbedding)
            features = RecencyFeatures(
                inputs.last_age[:, :, m], inputs.span[:, :, m], inputs.gap_count[:, :, m]
            )
            by_type = recency.embed(features, inputs.similarity_ids[:, :, m])
            embeddings.append(by_type[:, :, 1:].flatten(2))  # without the unknown type
        return embeddings

    def forward(self, user: UserInputs[Tensor], candidates: CandidateInputs[Tensor]) -> Tensor:
        """The last hidden layer (R, C, H) of all candidates of all requests."""
        return self.encode_candidates(self.encode_user(user), candidates)


def _standardize(standardizer: RunningStandardizer, values: Tensor) -> Tensor:
    """Standardized numeric features in any shape (…, F); in training they update the statistics.

    Padding is NaN, as missing values are, and does not count.
    """
    if not standardizer.training:
        standardized: Tensor = standardizer(values)
        return standardized
    updated: Tensor = standardizer(values.flatten(0, -2)).view_as(values)
    return updated
