"""The history encoder: a user's events as rows for the interaction module.

B candidates of R requests, N events, of which P are read, d row width, W event width.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from etl.errors import UserError
from features.schema import ITEM_TABLE, FeatureSchema
from training.data.batch import Batch, History
from training.data.history_selection import (
    EventFilter,
    HistorySelection,
    HistorySelector,
    TargetPairing,
)
from training.model.config import GemConfig
from training.model.embeddings import EmbeddingVectors
from training.model.heads import NextActionLoss, sample_followed_events
from training.model.history.events import EventTokenizer, MaskNetTokenizer, concat_item_vectors
from training.model.history.search import MatchedAttention, RecencyEmbedding
from training.model.hyformer import SequenceLevels
from training.model.sequence.event_groups import event_groups_of, max_events_of
from training.model.sequence.interformer import InterFormer, InterFormerOutput
from training.model.sequence.pyramid import EncodedEvents


class HistoryRows(NamedTuple):
    """What the history encoder returns.

    `request_rows` (R, n, d) are shared by the candidates of a request, `candidate_rows` (B, m, d)
    belong to a single one; there are no request rows if InterFormer's context is the candidate.
    `sequences` are the encoded events, for HyFormer. `next_action_loss` is None outside training,
    for a padding batch, or if disabled.
    """

    request_rows: Tensor
    candidate_rows: Tensor
    sequences: SequenceLevels
    next_action_loss: Tensor | None


class HistoryEncoder(nn.Module):
    """Encodes the most recent events with sequence layers, and searches all events by attribute.

    Two stages as in SIM (2006.05639): sequence layers are too expensive for thousands of events, so
    older events are attended to only if they share an attribute with the candidate.
    """

    def __init__(
        self,
        features: FeatureSchema,
        config: GemConfig,
        num_user_rows: int,
        num_candidate_rows: int,
    ) -> None:
        super().__init__()
        d, w = config.embedding_dim, config.event_width
        types = len(features.events)
        tables = 1 + len(features.item.categorical)
        vector_width = sum(features.item.vectors.values())
        self.item_tables = (ITEM_TABLE, *features.item.categorical)
        self.similarity_attributes, self.event_names = features.similarity_columns, features.events
        tokenizer_class = MaskNetTokenizer if config.sequence.masknet else EventTokenizer
        self.event_tokenizer = tokenizer_class(
            tables, d, vector_width, len(features.surfaces), types, w
        )
        self.event_tokenizer.add_attributes(features.history_attributes)
        self.candidate_projection = nn.Linear(tables * d + vector_width, w)
        self.candidate_projection.weight = self.event_tokenizer.item_projection.weight
        self.reads_candidates = config.sequence.context == "candidate"
        num_context_rows = num_user_rows + (num_candidate_rows if self.reads_candidates else 0)
        self.encoder = InterFormer(num_context_rows, config)
        encoders = self.encoder.encoders
        self.select_history = history_selector(features, config)
        self.matched_attention = nn.ModuleList(
            MatchedAttention(w, config.heads) for _ in self.similarity_attributes
        )
        self.recency = nn.ModuleList(
            RecencyEmbedding(features.item.categorical[name], types, d)
            for name in self.similarity_attributes
        )
        self.out = nn.Linear(w, d)
        self.next_action_losses = nn.ModuleList(
            NextActionLoss(w, encoder.width)
            for encoder in encoders
            if config.sequence.next_action_weight
        )
        attended_rows = len(encoders) + len(self.similarity_attributes) * (1 + types)
        self.request_rows = 0 if self.reads_candidates else self.encoder.out_rows
        self.candidate_rows = attended_rows + self.encoder.out_rows - self.request_rows

    @property
    def sequence_widths(self) -> list[int]:
        """The width of the events of each group, once they are encoded."""
        return [encoder.width for encoder in self.encoder.encoders]

    @property
    def row_names(self) -> tuple[list[str], list[str]]:
        """Names of the rows of requests and of candidates; see `forward`."""
        attributes = self.similarity_attributes
        candidates = [
            *(f"attended|{group}" for group in range(len(self.encoder.encoders))),
            *(f"matched|{name}" for name in attributes),
            *(f"recency|{name}|{event}" for name in attributes for event in self.event_names),
        ]
        encoded = [f"encoded|{row}" for row in range(self.encoder.out_rows)]
        return ([], candidates + encoded) if self.reads_candidates else (encoded, candidates)

    def forward(
        self,
        batch: Batch,
        selection: HistorySelection,
        vectors: EmbeddingVectors,
        user_rows: Tensor,
        candidate_rows: Tensor,
    ) -> HistoryRows:
        """Rows of the requests and of the candidates.

        `user_rows` (R, u, d) describe the users, and `candidate_rows` (B, c, d) the candidates.
        """
        history, encoders = batch.history, self.encoder.encoders
        tokens = selection.split_events(
            self.event_tokenizer(history, vectors.events, selection.positions)
        )
        ages = selection.split_events(history.age_seconds[selection.positions])
        sequences = [
            encoder.project_tokens(*inputs)
            for encoder, *inputs in zip(
                encoders,
                tokens.by_event_group,
                selection.event_group_offsets,
                ages.by_event_group,
                strict=True,
            )
        ]
        encoded = self._encode(batch.request_index, user_rows, candidate_rows, sequences)
        candidates = self.candidate_projection(
            concat_item_vectors(
                {name: vectors.candidates[name] for name in self.item_tables}, batch.row_vectors
            )
        )
        sequence_index = batch.request_index
        if self.encoder.options.encodes_each_candidate:
            sequence_index = torch.arange(len(candidates), device=candidates.device)
        attended = self._attend_to_event_groups(candidates, sequence_index, encoded, selection)
        attended += self._attend_to_matches(candidates, tokens.by_match, selection)
        recency = [
            embedding(recency)
            for embedding, recency in zip(self.recency, selection.recency, strict=True)
        ]
        loss = None
        if self.training and not batch.is_padding:  # its items were counted with their first batch
            loss = self._next_action_loss(history, selection, vectors, encoded.causal)
        rows_of_candidates = [torch.stack(attended, 1), *recency]
        rows_of_requests = encoded.rows
        if self.reads_candidates:
            rows_of_candidates.append(encoded.rows)
            rows_of_requests = user_rows[:, :0]
        return HistoryRows(
            rows_of_requests,
            torch.cat(rows_of_candidates, 1),
            SequenceLevels(encoded.levels, sequence_index),
            loss,
        )

    def _encode(
        self,
        request: Tensor,
        user_rows: Tensor,
        candidate_rows: Tensor,
        sequences: Sequence[EncodedEvents],
    ) -> InterFormerOutput:
        """Encode the sequences with the rows of the requests, or with those of the candidates."""
        output: InterFormerOutput
        if self.reads_candidates:
            x = torch.cat((user_rows[request], candidate_rows), 1)
            output = self.encoder(x, sequences, request)
        else:
            output = self.encoder(user_rows, sequences)
        return output

    def _attend_to_event_groups(
        self,
        candidates: Tensor,
        sequence_index: Tensor,
        encoded: InterFormerOutput,
        selection: HistorySelection,
    ) -> list[Tensor]:
        """A row (B, d) for each event group."""
        encoders = self.encoder.encoders
        pairs_by_group = selection.target_pairs or [None] * len(encoders)
        return [
            encoder.attend_from_candidates(candidates, sequence_index, events, pairs)
            for encoder, events, pairs in zip(
                encoders, encoded.full_length, pairs_by_group, strict=True
            )
        ]

    def _attend_to_matches(
        self, candidates: Tensor, matched_tokens: Sequence[Tensor], selection: HistorySelection
    ) -> list[Tensor]:
        """A row (B, d) for each similarity attribute."""
        return [
            self.out(attention(candidates, tokens, matches, pairs))
            for attention, tokens, matches, pairs in zip(
                self.matched_attention,
                matched_tokens,
                selection.matches,
                selection.match_pairs,
                strict=True,
            )
        ]

    def _next_action_loss(
        self,
        history: History,
        selection: HistorySelection,
        vectors: EmbeddingVectors,
        sequences: Sequence[EncodedEvents],
    ) -> Tensor | None:
        """Mean loss of the event groups; None if the model does not predict next actions.

        An item that is looked up as the unknown one is neither a target nor a negative: many items
        have this vector.
        """
        losses, first = [], 0
        modules = cast("list[NextActionLoss]", list(self.next_action_losses))
        for module, group, offsets, encoded in zip(
            modules, selection.event_groups, selection.event_group_offsets, sequences, strict=False
        ):
            is_unknown = vectors.unknown_events
            if is_unknown is not None:
                is_unknown = is_unknown[first : first + len(group)]
            sample = sample_followed_events(offsets, len(group), is_unknown=is_unknown)
            if len(sample.positions):
                following = first + sample.next_positions  # among the events that are read
                in_history = selection.positions[following]
                items = concat_item_vectors(
                    {name: vectors.events[name][following] for name in self.item_tables},
                    {name: v[in_history] for name, v in history.item_vectors.items()},
                )
                losses.append(
                    module(
                        encoded,
                        sample,
                        offsets,
                        history.item_index[in_history],
                        self.candidate_projection(items),
                    )
                )
            first += len(group)
        return torch.stack(losses).mean() if losses else None


def history_selector(features: FeatureSchema, config: GemConfig) -> HistorySelector:
    """What a model of this configuration reads of a history.

    Raises UserError if an event group names an event that the spec does not have.
    """
    options = config.sequence
    return HistorySelector(
        attributes=features.similarity_columns,
        event_filters=tuple(
            EventFilter(max_events_of(config, group), _event_type_codes(features, group.events))
            for group in event_groups_of(config).values()
        ),
        max_matched_events=config.matched_events,
        num_types=len(features.events) + 1,
        target_pairing=(
            TargetPairing(options.cls_tokens, options.encodes_each_candidate)
            if options.target_attention == "activation_unit"
            else None
        ),
    )


def _event_type_codes(features: FeatureSchema, events: Sequence[str]) -> tuple[int, ...]:
    unknown = [name for name in events if name not in features.events]
    if unknown:
        raise UserError(
            f"--model.sequence.event-groups names {', '.join(unknown)}; events of the spec are "
            f"{', '.join(features.events)}"
        )
    return tuple(1 + features.events.index(name) for name in events)
