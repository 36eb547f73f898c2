"""Several workers, each reading users of its own, as one stream: the same one every time.

A lane is a part of the buckets. The stream takes a batch of each lane in turn; lanes that have
ended are passed over.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import TypeVar

from torch.utils.data import DataLoader, IterableDataset

from etl.tables.lake import Lake
from training.data.batch import Batch
from training.data.parts import Shuffle
from training.data.reader import Reader
from training.data.ripened import Ripened

T = TypeVar("T")
AHEAD = 2  # batches that a worker makes before they are asked for


@dataclass(frozen=True)
class Pass:
    """What `Reader.batches` is asked for, but for the reader."""

    days: Sequence[date]
    ripened: Ripened
    rows: int
    shuffle: Shuffle
    shard: tuple[int, int]
    skip: int = 0

    def of(self, reader: Reader) -> Iterator[Batch]:
        """The batches that a reader gives."""
        return reader.batches(
            self.days, self.ripened, self.rows, self.shuffle, self.shard, self.skip
        )

    def size(self, reader: Reader) -> int:
        """How many batches there would be without `skip`; histories are not read."""
        found = reader.parts(self.days, self.ripened, self.rows, self.shuffle, self.shard)
        return sum(len(parts) for _, _, parts in found)


class Lane(IterableDataset[Batch]):
    """A pass over some buckets, with a reader of its own in whichever process iterates it."""

    def __init__(self, reader: Reader, asked: Pass) -> None:
        self._lake: Lake = reader.lake
        self._versions: Mapping[str, int] = reader.versions
        self._cut = reader.sequence, reader.max_length, reader.surfaces
        self._asked = asked

    def __iter__(self) -> Iterator[Batch]:
        return self._asked.of(Reader(self._lake, self._versions, *self._cut))


def read(reader: Reader, asked: Pass, workers: int) -> Iterator[Batch]:
    """The batches of a pass, made in this process or by `workers` others."""
    if not workers:
        return asked.of(reader)
    rank, world = asked.shard
    lanes = [
        replace(asked, shard=(rank + world * lane, world * workers), skip=0)
        for lane in range(workers)
    ]
    if not asked.skip:
        return in_turn([_worker(reader, lane) for lane in lanes])
    order = turns([lane.size(reader) for lane in lanes])
    done = Counter(order[: asked.skip])
    streams = [_worker(reader, replace(lane, skip=done[n])) for n, lane in enumerate(lanes)]
    return (next(streams[lane]) for lane in order[asked.skip :])


def _worker(reader: Reader, lane: Pass) -> Iterator[Batch]:
    loader = DataLoader(
        Lane(reader, lane),
        batch_size=None,
        num_workers=1,
        prefetch_factor=AHEAD,
        multiprocessing_context="spawn",
    )
    return iter(loader)


def in_turn(streams: Sequence[Iterator[T]]) -> Iterator[T]:
    """An item of each stream in turn; those that have ended are passed over."""
    alive = list(streams)
    while alive:
        for stream in list(alive):
            try:
                yield next(stream)
            except StopIteration:
                alive.remove(stream)


def turns(lengths: Sequence[int]) -> list[int]:
    """Which of several streams `in_turn` asks, in order, by how long they are."""
    return [
        lane for _, lane in sorted((t, n) for n, size in enumerate(lengths) for t in range(size))
    ]
