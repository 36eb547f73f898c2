"""InterFormer (2411.09852): sequences and non-sequence rows exchange information at each layer.

N events of R requests, n rows of a request, W width of an event group, d row width. The paper's
rows include the candidate; here they are those of the request only, so that the module runs once
for all candidates of a request.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from training.model.config import EventGroupOptions, GemConfig
from training.model.interaction.wukong import RowLinear, WukongLayer, WukongShape
from training.model.sequence.attention import TargetAttention
from training.model.sequence.pooling import HierarchicalSeedPooling, PmaPooling, most_recent_events
from training.model.sequence.pyramid import EncodedEvents, EncoderSizes, PyramidLevel


class EventGroupEncoder(nn.Module):
    """A stack of pyramid levels over the events of some types, with its own sizes.

    Sizes by event group are the event-level personalization of Kunlun (2602.10016).
    """

    def __init__(self, config: GemConfig, group: EventGroupOptions) -> None:
        super().__init__()
        options, d = config.sequence, config.embedding_dim
        w, heads = group.width or config.event_width, group.heads or config.heads
        self.event_types = group.events
        self.max_events = group.max_events or config.encoded_events
        sizes = EncoderSizes(
            width=w,
            heads=heads,
            window=group.window or config.window,
            max_events=self.max_events,
            row_width=d,
            context_rows=config.context_rows,
        )
        depth = 0 if options.flow == "sole" else group.layers or config.event_layers
        self.input_projection = (
            nn.Identity() if w == config.event_width else nn.Linear(config.event_width, w)
        )
        self.cls_tokens = (
            nn.Parameter(torch.randn(options.cls_tokens, w) * w**-0.5)
            if options.cls_tokens
            else None
        )
        self.levels = nn.ModuleList(PyramidLevel(level, options, sizes) for level in range(depth))
        pooling_class = PmaPooling if options.pooling == "pma" else HierarchicalSeedPooling
        self.pooling = pooling_class(w, heads, config.pooled_rows)
        self.num_last_rows = options.cls_tokens + config.recent_rows
        self.num_rows = config.pooled_rows + self.num_last_rows
        self.target_attention = TargetAttention(w, heads)
        self.out = nn.Linear(w, d)

    def project_tokens(self, tokens: Tensor, offsets: Tensor, ages: Tensor) -> EncodedEvents:
        """Tokens (N, event width) as a sequence that ends with the CLS tokens, which see all."""
        sequence = EncodedEvents(self.input_projection(tokens), offsets, ages)
        return sequence if self.cls_tokens is None else append_tokens(sequence, self.cls_tokens)

    def encode_level(
        self, level: int, encoded: EncodedEvents, context: Tensor | None
    ) -> EncodedEvents:
        """Apply a level, if the group has it; `context` (R, n, d) are the context rows."""
        if level >= len(self.levels):
            return encoded
        next_level: EncodedEvents = self.levels[level](encoded, context)
        return next_level

    def summarize(self, encoded: EncodedEvents) -> Tensor:
        """Summary rows (R, num_rows, d): pooled rows, then CLS tokens and the latest events."""
        pooled = self.pooling(encoded.events, encoded.offsets)
        last = most_recent_events(encoded.events, encoded.offsets, self.num_last_rows)
        summary: Tensor = self.out(torch.cat((pooled, last), 1))
        return summary

    def attend_from_candidates(
        self, candidates: Tensor, request: Tensor, encoded: EncodedEvents
    ) -> Tensor:
        """Attention of candidates (B, event width) to the events: a row (B, d) of each."""
        queries = self.input_projection(candidates)
        attended = self.target_attention(queries, encoded.events, request, encoded.offsets)
        rows: Tensor = self.out(attended)
        return rows


def append_tokens(encoded: EncodedEvents, tokens: Tensor) -> EncodedEvents:
    """Append the same tokens (n, W) to the sequence of each request, with an age of one second."""
    count, requests, device = len(tokens), len(encoded.offsets) - 1, tokens.device
    offsets = encoded.offsets + count * torch.arange(requests + 1, device=device)
    total = int(offsets[-1])
    token_index = (offsets[1:, None] - torch.arange(count, 0, -1, device=device)).flatten()
    is_event = torch.ones(total, dtype=torch.bool, device=device)
    event_index = is_event.index_fill_(0, token_index, False).nonzero().flatten()
    events = tokens.new_empty(total, tokens.shape[1])
    events = events.index_copy(0, event_index, encoded.events)
    events = events.index_copy(0, token_index, tokens.repeat(requests, 1))
    ages = encoded.ages.new_ones(total).index_copy_(0, event_index, encoded.ages)
    return EncodedEvents(events, offsets, ages)


def event_groups_of(config: GemConfig) -> Sequence[EventGroupOptions]:
    """The event groups of a configuration; one group of all event types if it names none."""
    return list(config.sequence.event_groups.values()) or [EventGroupOptions(events=())]


class SelfGate(nn.Module):
    """x * sigmoid(W x), (…, d) to (…, d).

    The paper prints sigmoid(x * W x), which would lose the signs of x.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Gate each row by itself."""
        gated: Tensor = x * torch.sigmoid(self.linear(x))
        return gated


class ContextSummary(nn.Module):
    """Gate(LCE(X)): linear combinations of the rows, (R, n, d) to (R, context_rows, d)."""

    def __init__(self, rows: int, context_rows: int, width: int) -> None:
        super().__init__()
        self.row_linear = RowLinear(rows, context_rows)
        self.gate = SelfGate(width)

    def forward(self, x: Tensor) -> Tensor:
        """Context rows for the sequences."""
        context: Tensor = self.gate(self.row_linear(x.transpose(0, 1)).transpose(0, 1))
        return context


class InterFormerOutput(NamedTuple):
    """`request_rows` (R, m, d), and the `sequences` of each event group at full length."""

    request_rows: Tensor
    sequences: list[EncodedEvents]


class InterFormer(nn.Module):
    """Encodes the sequences of all event groups together with the rows of a request.

    Each layer has up to three parts, depending on `flow`: a context summary of the rows
    personalizes the sequences (n2s), each sequence passes one level, and a Wukong layer mixes the
    rows with the summaries of the sequences (s2n).
    """

    def __init__(self, rows: int, config: GemConfig) -> None:
        super().__init__()
        options, d = config.sequence, config.embedding_dim
        self.options = options
        self.encoder_modules = nn.ModuleList(
            EventGroupEncoder(config, group) for group in event_groups_of(config)
        )
        self.depth = max(len(encoder.levels) for encoder in self.encoders)
        summary_rows = sum(encoder.num_rows for encoder in self.encoders)
        fm_rows = config.request_rows // 2
        shape = WukongShape(
            width=d,
            fm_rows=fm_rows,
            linear_rows=config.request_rows - fm_rows,
            rank=config.rank,
            hidden=config.mlp_width,
        )
        rows_after_first = shape.out_rows if options.updates_context else rows
        input_rows = [rows] + [rows_after_first] * (self.depth - 1)
        self.context_summaries = nn.ModuleDict(
            {
                str(level): ContextSummary(n, config.context_rows, d)
                for level, n in enumerate(input_rows)
                if options.receives_context(level)
            }
        )
        self.interaction_norms = nn.ModuleList(
            nn.LayerNorm(d) for _ in input_rows if options.updates_context
        )
        self.interaction_layers = nn.ModuleList(
            WukongLayer(n + summary_rows, shape) for n in input_rows if options.updates_context
        )
        self.out_rows = summary_rows + (shape.out_rows if options.updates_context else 0)

    @property
    def encoders(self) -> list[EventGroupEncoder]:
        """The encoder of each event group."""
        return cast("list[EventGroupEncoder]", list(self.encoder_modules))

    def forward(self, x: Tensor, sequences: Sequence[EncodedEvents]) -> InterFormerOutput:
        """Encode rows (R, n, d) and the projected tokens of each event group.

        The returned sequences are those after the first level, because later levels shorten them.
        """
        full_length, summary = list(sequences), None
        for level in range(self.depth):
            context = None
            if self.options.receives_context(level):
                context = self.context_summaries[str(level)](x)
            sequences = [
                encoder.encode_level(level, sequence, context)
                for encoder, sequence in zip(self.encoders, sequences, strict=True)
            ]
            if level == 0:
                full_length = list(sequences)
            if self.options.updates_context:
                if summary is None or self.options.updates_summary(level):
                    summary = self._summarize(sequences)
                x = self._interact(level, x, summary)
        rows = self._summarize(sequences)
        if self.options.updates_context:
            rows = torch.cat((x, rows), 1)
        return InterFormerOutput(rows, full_length)

    def _interact(self, level: int, x: Tensor, summary: Tensor) -> Tensor:
        """Mix rows (R, n, d) and summary rows (R, s, d) with a Wukong layer."""
        rows = torch.cat((x, summary), 1).transpose(0, 1)
        mixed: Tensor = self.interaction_layers[level](self.interaction_norms[level](rows))
        return mixed.transpose(0, 1)

    def _summarize(self, sequences: Sequence[EncodedEvents]) -> Tensor:
        """Summary rows (R, s, d) of all event groups."""
        summaries = [
            encoder.summarize(sequence)
            for encoder, sequence in zip(self.encoders, sequences, strict=True)
        ]
        return torch.cat(summaries, 1)
