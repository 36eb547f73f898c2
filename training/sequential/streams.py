"""Batches of a log: rows to score, and what their users did before.

N entries, B rows, E events of C chunks, M numbers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from training.ops.ragged import runs
from training.sequential.counts import limits, numbers
from training.sequential.files import POSITIVE, Log

CHUNK = 128  # entries of a user that look back from one place, so that it is encoded once
BACK = 384  # entries before the chunk's first that its rows see at least
BATCH_ROWS = 512


@dataclass(frozen=True)
class Entries:
    """What is told of entries (n), but for their labels; `numbers` are (n, M).

    `person` and `key` name users and items for their attributes, `user` and `item` for their rows.
    """

    user: Tensor
    person: Tensor
    item: Tensor
    key: Tensor
    numbers: Tensor

    def at(self, positions: Tensor) -> "Entries":
        """Those at some positions."""
        return Entries(*(getattr(self, field.name)[positions] for field in fields(self)))


@dataclass(frozen=True)
class Streams:
    """`rows` (B) sorted by `chunk` (B), and the `events` (E) of the chunks, cut by `offsets` (C+1).

    A row sees the first `limits` (B) events of its chunk. `labels` (E) are of the events.
    """

    rows: Entries
    chunk: Tensor
    limits: Tensor
    events: Entries
    labels: Tensor
    offsets: Tensor


class Source:
    """A log as tensors, and its rows of each split."""

    def __init__(self, log: Log) -> None:
        self.log = log
        told = log.user, log.person, log.item, log.key, numbers(log)
        self.entries = Entries(*(torch.from_numpy(np.ascontiguousarray(x)) for x in told))
        self.labels = torch.from_numpy(log.label)
        self.limits = torch.from_numpy(limits(log))
        self.first = torch.from_numpy(log.user_offsets)[self.entries.person]

    @property
    def numbers(self) -> int:
        """How many numbers are told of an entry."""
        return self.entries.numbers.shape[1]

    def chunk(self, rows: Tensor) -> Tensor:
        """A number (B) that only rows of the same chunk share; rows (B) are sorted positions."""
        place = rows - self.first[rows]
        return self.first[rows] + place // CHUNK

    def streams(self, rows: Tensor) -> Streams:
        """Rows by position (B); those of a chunk must stand together, oldest first."""
        _, chunk, counts = torch.unique_consecutive(
            self.chunk(rows), return_inverse=True, return_counts=True
        )
        newest = rows[counts.cumsum(0) - 1]
        first, stop = self.first[newest], self.limits[newest]
        begin = ((newest - first) // CHUNK * CHUNK - BACK).clamp(min=0).minimum(stop)
        events, offsets = runs(first + begin, stop - begin)
        limits = (self.limits[rows] - begin[chunk]).clamp(min=0)
        told = self.entries.at(events)
        return Streams(self.entries.at(rows), chunk, limits, told, self.labels[events], offsets)


Batch = tuple[tuple[Streams], Tensor]


@dataclass(frozen=True)
class Rows:
    """The rows of a split, in batches of whole chunks."""

    source: Source
    split: int

    def shuffled(self, generator: torch.Generator) -> Iterator[Batch]:
        """Batches of all rows, chunks in random order."""
        chunks = self._chunks()
        order = torch.randperm(len(chunks), generator=generator).tolist()
        return self._batches([chunks[i] for i in order])

    def in_order(self) -> Iterator[Batch]:
        """Batches as they stand in the log."""
        return self._batches(self._chunks())

    def _chunks(self) -> list[Tensor]:
        """Positions of the rows of each chunk."""
        at = torch.from_numpy(np.flatnonzero(self.source.log.split == self.split))
        _, counts = torch.unique_consecutive(self.source.chunk(at), return_counts=True)
        return list(at.split(counts.tolist()))

    def _batches(self, chunks: Sequence[Tensor]) -> Iterator[Batch]:
        ends = np.cumsum([len(chunk) for chunk in chunks])
        for batch in np.split(np.arange(len(chunks)), _cuts(ends)):
            rows = torch.cat([chunks[i] for i in batch])
            yield (self.source.streams(rows),), (self.source.labels[rows] == POSITIVE).float()


def _cuts(ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where batches of about BATCH_ROWS rows begin, of chunks whose rows end at `ends`."""
    return np.flatnonzero(np.diff((ends - 1) // BATCH_ROWS)) + 1
