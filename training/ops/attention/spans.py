"""Which keys each query sees, as spans, and both sides in blocks: what a GPU's kernels go by."""

from dataclasses import dataclass

import torch
from torch import Tensor

from training.ops.attention.kinds import Kind
from training.ops.ragged import group_of_each, position_in_group, runs


@dataclass(frozen=True)
class Blocks:
    """Blocks of rows: [first, last) of a side, and the span [begin, end) of the other side.

    `keys_from` is where the keys of a block's sequence begin. Spans of queries are rows, spans of
    keys are places in their sequence.
    """

    first: Tensor
    last: Tensor
    keys_from: Tensor
    begin: Tensor
    end: Tensor

    @property
    def told(self) -> tuple[Tensor, ...]:
        """As the kernels take them."""
        return self.first, self.last, self.keys_from, self.begin, self.end


@dataclass(frozen=True)
class Plan:
    """Which keys each query sees, [low, high) of its sequence (N), and both sides in blocks."""

    low: Tensor
    high: Tensor
    queries: Blocks
    keys: Blocks

    @classmethod
    def of(
        cls, q_offsets: Tensor, kv_offsets: Tensor, kind: Kind, window: int | None,
        limits: Tensor | None, block: int,
    ) -> "Plan":  # fmt: skip
        """Everything in tensors: nothing waits for the device but the number of blocks."""
        sequence, place = group_of_each(q_offsets), position_in_group(q_offsets)
        low, high = torch.zeros_like(place), kv_offsets.diff()[sequence]
        if kind.causal:
            high = place + 1
            low = (place // window - 1).clamp(min=0) * window if window else low
        elif limits is not None:
            high = torch.minimum(high, limits)
        first, last, of = _cut(q_offsets, block)
        block_of = torch.searchsorted(first, torch.arange(len(low), device=low.device), right=True)
        begin = _least(low, block_of - 1, len(first))
        end = -_least(-high, block_of - 1, len(first))
        queries = Blocks(first, last, kv_offsets[of], begin, end)
        first, last, of = _cut(kv_offsets, block)
        begin, end = q_offsets[of], q_offsets[of + 1]
        if kind.causal:
            begin, end = _seen_by(begin, end, first - kv_offsets[of], last - kv_offsets[of], window)
        return cls(low, high, queries, Blocks(first, last, kv_offsets[of], begin, end))


def _cut(offsets: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """First and last row of each block, and its sequence; sequences do not share blocks."""
    counts = (offsets.diff() + block - 1) // block
    number, _ = runs(torch.zeros_like(counts), counts)
    of = torch.repeat_interleave(torch.arange(len(counts), device=offsets.device), counts)
    first = offsets[of] + number * block
    return first, torch.minimum(first + block, offsets[of + 1]), of


def _least(values: Tensor, group: Tensor, groups: int) -> Tensor:
    found = values.new_full((groups,), torch.iinfo(values.dtype).max)
    return found.scatter_reduce(0, group, values, "amin")


def _seen_by(
    begin: Tensor, end: Tensor, first: Tensor, last: Tensor, window: int | None
) -> tuple[Tensor, Tensor]:
    """Rows of causal queries that see some of the keys [first, last) of their sequence."""
    if window:
        end = torch.minimum(end, begin + ((last - 1) // window + 2) * window)
    return begin + first, end
