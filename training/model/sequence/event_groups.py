"""Encoders of event groups, each with its own sizes and its own rows.

N events of R sequences, n non-sequence rows (X) of each, m tokens made of them, B candidates, W
width of an event group, d width of a row.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile

import torch
from torch import Tensor, nn

from etl.errors import UserError
from training.model.config import EventGroupOptions, GemConfig
from training.model.sequence.pooling import HierarchicalSeedPooling, PmaPooling
from training.model.sequence.pyramid import EncodedEvents, EncoderSizes, PyramidLevel
from training.model.sequence.summaries import ContextSummary, SequenceSummary
from training.model.sequence.target_attention import ActivationUnitAttention, TargetAttention
from training.ops.ragged import QueryKeyPairs, segment_ids

FINAL = "final"  # name of the summary after the last level


def event_groups_of(config: GemConfig) -> Mapping[str, EventGroupOptions]:
    """The event groups of a configuration; one group of all event types if it names none."""
    return config.sequence.event_groups or {"all": EventGroupOptions(events=())}


def max_events_of(config: GemConfig, group: EventGroupOptions) -> int:
    """The most recent events that an event group encodes."""
    return group.max_events or config.sequence.max_events or config.encoded_events


def group_depths(config: GemConfig) -> list[int]:
    """Layers of each event group.

    Raises UserError if an option of the sequences has no effect with that few layers.
    """
    options = config.sequence
    depths = {
        name: group.layers or options.num_layers or config.event_layers
        for name, group in event_groups_of(config).items()
    }
    if options.flow == "sole":
        depths = dict.fromkeys(depths, 0)
    fix = "set --model.sequence.num-layers, and a flow other than sole"
    for name, depth in depths.items():
        if options.computation_skip and depth < 2:
            raise UserError(
                "--model.sequence.computation-skip needs two sequence layers or more, because the "
                f"first does not attend; event group {name} has {depth}: {fix}"
            )
    if options.pyramid_stride > 1 and not options.shortens(max(depths.values()) - 1):
        raise UserError(
            f"--model.sequence.pyramid-stride {options.pyramid_stride} merges no events in "
            f"{max(depths.values())} sequence layers: {fix}"
        )
    return list(depths.values())


class EventGroupEncoder(nn.Module):
    """A stack of pyramid levels over the events of some types, with its own sizes and rows.

    Sizes, summary rows and context rows by event group are the event-level personalization of
    Kunlun (2602.10016). `context_rows` is the number of non-sequence rows before the first level;
    `context_sizes` has that of each level of the deepest group, of which this one has `depth`.
    """

    def __init__(
        self,
        config: GemConfig,
        group: EventGroupOptions,
        depth: int,
        context_rows: int,
        context_sizes: Sequence[int],
    ) -> None:
        super().__init__()
        options, d = config.sequence, config.embedding_dim
        w, heads = group.width or config.event_width, group.heads or config.heads
        self.event_types, self.width = group.events, w
        self.max_events = max_events_of(config, group)
        sizes = EncoderSizes(
            width=w,
            heads=heads,
            window=group.window or config.window,
            max_events=self.max_events,
            row_width=d,
            context_rows=config.context_rows,
        )
        self.input_projection = (
            nn.Identity() if w == config.event_width else nn.Linear(config.event_width, w)
        )
        self.levels = nn.ModuleList(PyramidLevel(level, options, sizes) for level in range(depth))
        self.context_summaries = nn.ModuleDict(
            {
                str(level): ContextSummary(context_sizes[level], config.context_rows, d)
                for level in range(depth)
                if options.receives_context(level)
            }
        )
        self.cls_summary, self.cls_projection = None, None
        if options.cls_tokens:
            self.cls_summary = ContextSummary(context_rows, options.cls_tokens, d)
            self.cls_projection = nn.Linear(d, w)
        self.num_full_length_levels = _count_leading(
            not options.shortens(level) for level in range(depth)
        )
        self.num_causal_levels = _count_leading(
            not options.mixes_positions(level) for level in range(depth)
        )
        self._build_summaries(config, group, len(context_sizes))
        self.target_attention = (
            ActivationUnitAttention(w)
            if options.target_attention == "activation_unit"
            else TargetAttention(w, heads)
        )
        self.target_out = nn.Linear(w, d)

    def _build_summaries(self, config: GemConfig, group: EventGroupOptions, depth: int) -> None:
        """A summary before each level that mixes it with non-sequence rows, and the final one."""
        options, d, w = config.sequence, config.embedding_dim, self.width
        pooled_rows = group.pooled_rows or config.pooled_rows
        last_rows = options.cls_tokens + (group.recent_rows or config.recent_rows)
        pooling_class = PmaPooling if options.pooling == "pma" else HierarchicalSeedPooling
        self.num_rows = pooled_rows + last_rows
        mixed = range(depth if options.updates_context else 0)
        names = [str(level) for level in mixed if options.updates_summary(level)]
        self.summaries = nn.ModuleDict(
            {
                name: SequenceSummary(
                    pooling_class(w, group.heads or config.heads, pooled_rows), last_rows, w, d
                )
                for name in (*names, FINAL)
            }
        )

    def project_tokens(self, tokens: Tensor, offsets: Tensor, ages: Tensor) -> EncodedEvents:
        """Tokens (N, event width) as the sequence of this group."""
        return EncodedEvents(self.input_projection(tokens), offsets, ages)

    def append_cls_tokens(self, encoded: EncodedEvents, x: Tensor) -> EncodedEvents:
        """Append the summary of rows (R, n, d) as tokens, which follow the newest event.

        Self-attention has a window for them, too: with a window w a layer shows them about the w
        newest events, and not all of them as in InterFormer (2411.09852).
        """
        if self.cls_summary is None or self.cls_projection is None:
            return encoded
        return append_tokens(encoded, self.cls_projection(self.cls_summary(x)))

    def encode_level(self, level: int, encoded: EncodedEvents, x: Tensor) -> EncodedEvents:
        """Apply a level, if the group has it; rows (R, n, d) personalize it."""
        if level >= len(self.levels):
            return encoded
        context = None
        if str(level) in self.context_summaries:
            context = self.context_summaries[str(level)](x)
        next_level: EncodedEvents = self.levels[level](encoded, context)
        return next_level

    def summarize(self, name: str, encoded: EncodedEvents) -> Tensor:
        """Summary rows (R, num_rows, d) before the level of that number, or the final ones."""
        summary: Tensor = self.summaries[name](encoded)
        return summary

    def attend_from_candidates(
        self,
        candidates: Tensor,
        request: Tensor,
        encoded: EncodedEvents,
        pairs: QueryKeyPairs | None = None,
    ) -> Tensor:
        """Attention of candidates (B, event width) to the events: a row (B, d) of each.

        The activation unit needs their `pairs`.
        """
        queries = self.input_projection(candidates)
        where = (request, encoded.offsets) if pairs is None else (pairs,)
        attended = self.target_attention(queries, encoded.events, *where)
        rows: Tensor = self.target_out(attended)
        return rows


def _count_leading(conditions: Iterable[bool]) -> int:
    """The number of conditions that hold before the first that does not."""
    return sum(takewhile(bool, conditions))


def append_tokens(encoded: EncodedEvents, tokens: Tensor) -> EncodedEvents:
    """Append tokens (R, m, W) to each sequence, with an age of one second."""
    (requests, count, width), device = tokens.shape, tokens.device
    events, old_offsets = encoded.events, encoded.offsets
    offsets = old_offsets + count * torch.arange(requests + 1, device=device)
    event_index = torch.arange(len(events), device=device) + count * segment_ids(
        old_offsets, len(events)
    )
    token_index = (offsets[1:, None] - torch.arange(count, 0, -1, device=device)).flatten()
    total = len(events) + requests * count
    longer = events.new_empty(total, width).index_copy(0, event_index, events)
    longer = longer.index_copy(0, token_index, tokens.flatten(0, 1).to(events.dtype))
    ages = encoded.ages.new_ones(total).index_copy_(0, event_index, encoded.ages)
    return EncodedEvents(longer, offsets, ages)
