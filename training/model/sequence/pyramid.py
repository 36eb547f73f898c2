"""The pyramid: a stack of levels, each of which shortens the older part of a sequence.

N events of R requests, M of them after shortening, W width, d width of a non-sequence row.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.model.config import SequenceOptions
from training.model.sequence.attention import RotaryTimeEncoding, split_heads
from training.model.sequence.layers import (
    Gdpa,
    HstuLayer,
    PersonalizedFFN,
    TransformerLayer,
    gdpa_kind,
)
from training.ops.ragged import concat_ranges, position_in_segment, segment_ids


@dataclass(frozen=True)
class MergedSlots:
    """Assignment of events (N) to `slot`s of a shorter sequence, with its `offsets` (R + 1).

    `rank` (N) is the position of an event in its slot, counted from its latest event.
    """

    slot: Tensor
    rank: Tensor
    offsets: Tensor

    def sum(self, x: Tensor) -> Tensor:
        """Values (N, …) to the sums (M, …) of each slot."""
        return x.new_zeros(int(self.offsets[-1]), *x.shape[1:]).index_add(0, self.slot, x)

    def mean(self, x: Tensor) -> Tensor:
        """Values (N) to the means (M) of each slot."""
        return self.sum(x) / self.sum(torch.ones_like(x))


def merge_older_events(offsets: Tensor, stride: int, keep_recent: int) -> MergedSlots:
    """Keep the most recent `keep_recent` events; merge each `stride` older ones to one slot.

    Slots are counted from the latest event, so older events do not change the content of a slot.
    """
    lengths = offsets.diff()
    request = segment_ids(offsets)
    back = lengths[request] - 1 - position_in_segment(offsets)
    is_recent, older_back = back < keep_recent, back - keep_recent
    slots_back = torch.where(is_recent, back, keep_recent + older_back // stride)
    older = (lengths - keep_recent).clamp(min=0)
    slots = lengths - older + (older + stride - 1) // stride
    slot_offsets = F.pad(slots.cumsum(0), (1, 0))
    return MergedSlots(
        slot=slot_offsets[1:][request] - 1 - slots_back,
        rank=torch.where(is_recent, 0, older_back % stride),
        offsets=slot_offsets,
    )


class EventMerging(nn.Module):
    """Merges the events of a slot by a softmax over learned scores, in each head.

    Scores depend on an event and on its position in the slot. They start at zero, so that merging
    starts as the mean; a slot of one event is that event.
    """

    def __init__(self, width: int, heads: int, stride: int) -> None:
        super().__init__()
        self.heads = heads
        self.score = nn.Linear(width, heads, bias=False)
        nn.init.zeros_(self.score.weight)
        self.rank_score = nn.Parameter(torch.zeros(stride, heads))

    def forward(self, events: Tensor, slots: MergedSlots) -> Tensor:
        """(N, W) to (M, W)."""
        scores = self.score(events) + self.rank_score[slots.rank]
        index = slots.slot[:, None].expand_as(scores)
        largest = scores.new_zeros(int(slots.offsets[-1]), self.heads).scatter_reduce(
            0, index, scores.detach(), "amax", include_self=False
        )
        weights = torch.exp(scores - largest[slots.slot])
        weights = weights / slots.sum(weights)[slots.slot]
        by_head = split_heads(events, self.heads)
        return slots.sum((by_head * weights[..., None]).flatten(1))


@dataclass(frozen=True)
class EncodedEvents:
    """Events (N, W), cut into requests by `offsets` (R + 1), and their `ages` (N) in seconds."""

    events: Tensor
    offsets: Tensor
    ages: Tensor

    def repeat(self, request: Tensor) -> "EncodedEvents":
        """The sequence of the request of each candidate, `request` (B): B sequences."""
        copies = concat_ranges(self.offsets[request], self.offsets.diff()[request])
        return EncodedEvents(
            self.events[copies.positions], copies.offsets, self.ages[copies.positions]
        )


@dataclass(frozen=True)
class EncoderSizes:
    """Sizes of an event group's levels; `row_width` and `context_rows` are of the context rows.

    With a `window` an event attends to itself and the `window` events before it.
    """

    width: int
    heads: int
    window: int | None
    max_events: int
    row_width: int
    context_rows: int


class PersonalizedFFNBlock(nn.Module):
    """S + FFN(LN(S)), with a feed-forward net generated from context rows (PFFN or GDPA)."""

    def __init__(self, options: SequenceOptions, sizes: EncoderSizes) -> None:
        super().__init__()
        w = sizes.width
        self.row_projection = nn.Linear(sizes.row_width, w)
        self.norm = nn.LayerNorm(w)
        self.ffn = (
            PersonalizedFFN(sizes.context_rows, w)
            if options.personalization == "pffn"
            else Gdpa(
                sizes.context_rows, w, sizes.heads, 2 * w, gdpa_kind(options, sizes.max_events)
            )
        )

    def forward(self, events: Tensor, offsets: Tensor, rows: Tensor) -> Tensor:
        """Events (N, W) and context rows (R, context_rows, d) to (N, W)."""
        out: Tensor = events + self.ffn(self.norm(events), offsets, self.row_projection(rows))
        return out


class PyramidLevel(nn.Module):
    """One level: shorten, personalize by context rows, and apply a sequence layer.

    With computation skipping (Kunlun, 2602.10016) even levels are only personalized, and odd ones
    only apply the layer.
    """

    def __init__(self, level: int, options: SequenceOptions, sizes: EncoderSizes) -> None:
        super().__init__()
        has_layer = options.uses_attention(level)
        has_rotary = has_layer and options.rotary
        self.stride, self.keep_recent = options.pyramid_stride, options.pyramid_keep_recent
        self.merging = (
            EventMerging(sizes.width, sizes.heads, self.stride) if options.shortens(level) else None
        )
        self.personalized_ffn = (
            PersonalizedFFNBlock(options, sizes) if options.receives_context(level) else None
        )
        self.layer = _build_layer(options, sizes) if has_layer else None
        self.rotary = RotaryTimeEncoding(sizes.width // sizes.heads) if has_rotary else None

    def forward(self, encoded: EncodedEvents, rows: Tensor | None) -> EncodedEvents:
        """Encode one level; `rows` (R, context_rows, d) are None if it is not personalized."""
        if self.merging:
            slots = merge_older_events(encoded.offsets, self.stride, self.keep_recent)
            encoded = EncodedEvents(
                events=self.merging(encoded.events, slots),
                offsets=slots.offsets,
                ages=slots.mean(encoded.ages.float()),
            )
        events = encoded.events
        if self.personalized_ffn:
            assert rows is not None
            events = self.personalized_ffn(events, encoded.offsets, rows)
        if self.layer:
            angles = self.rotary(encoded.offsets, encoded.ages) if self.rotary else None
            events = self.layer(events, encoded.offsets, angles)
        return replace(encoded, events=events)


def _build_layer(options: SequenceOptions, sizes: EncoderSizes) -> nn.Module:
    if options.layer == "hstu":
        return HstuLayer(sizes.width, sizes.heads, sizes.window, sizes.max_events)
    return TransformerLayer(sizes.width, sizes.heads, sizes.window, 2 * sizes.width)
