"""The pyramid: a stack of levels, each of which shortens the older part of a sequence.

N events of R requests, M of them after shortening, W width, d width of a non-sequence row.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.model.config import SequenceOptions
from training.model.sequence.attention import RotaryTimeEncoding
from training.model.sequence.layers import Gdpa, HstuLayer, PersonalizedFFN, TransformerLayer
from training.ops.ragged import position_in_segment, segment_ids


@dataclass(frozen=True)
class PooledSequence:
    """Assignment of events (N) to `slot`s of a shorter sequence, with its `offsets` (R + 1)."""

    slot: Tensor
    offsets: Tensor

    def mean_pool(self, x: Tensor) -> Tensor:
        """Values (N, …) to the means (M, …) of each slot."""
        slots = int(self.offsets[-1])
        sums = x.new_zeros(slots, *x.shape[1:]).index_add(0, self.slot, x)
        counts = torch.bincount(self.slot, minlength=slots).to(x.dtype)
        return sums / counts.view(-1, *[1] * (x.dim() - 1))


def pool_older_events(offsets: Tensor, stride: int, keep_recent: int) -> PooledSequence:
    """Keep the most recent `keep_recent` events; pool each `stride` older ones to one slot.

    Slots are counted from the latest event, so older events do not change the content of a slot.
    """
    lengths = offsets.diff()
    request = segment_ids(offsets)
    back = lengths[request] - 1 - position_in_segment(offsets)
    slots_back = torch.where(back < keep_recent, back, keep_recent + (back - keep_recent) // stride)
    older = (lengths - keep_recent).clamp(min=0)
    slots = lengths - older + (older + stride - 1) // stride
    slot_offsets = F.pad(slots.cumsum(0), (1, 0))
    return PooledSequence(slot_offsets[1:][request] - 1 - slots_back, slot_offsets)


@dataclass(frozen=True)
class EncodedEvents:
    """Events (N, W), cut into requests by `offsets` (R + 1), and their `ages` (N) in seconds."""

    events: Tensor
    offsets: Tensor
    ages: Tensor


@dataclass(frozen=True)
class EncoderSizes:
    """Sizes of an event group's levels; `row_width` and `context_rows` are of the context rows."""

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
            else Gdpa(sizes.context_rows, w, sizes.heads, 2 * w)
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
        self.stride = options.pyramid_stride if level else 1
        self.keep_recent = options.pyramid_keep_recent
        self.personalized_ffn = (
            PersonalizedFFNBlock(options, sizes) if options.receives_context(level) else None
        )
        self.layer = _build_layer(options, sizes) if has_layer else None
        self.rotary = RotaryTimeEncoding(sizes.width // sizes.heads) if has_rotary else None

    def forward(self, encoded: EncodedEvents, rows: Tensor | None) -> EncodedEvents:
        """Encode one level; `rows` (R, context_rows, d) are None if it is not personalized."""
        if self.stride > 1:
            pooled = pool_older_events(encoded.offsets, self.stride, self.keep_recent)
            encoded = EncodedEvents(
                events=pooled.mean_pool(encoded.events),
                offsets=pooled.offsets,
                ages=pooled.mean_pool(encoded.ages.float()),
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
