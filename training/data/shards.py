"""Shards of an epoch: several workers, each with its own users, as one reproducible stream.

A shard is a part of the buckets. The stream takes a batch of each shard in turn; exhausted shards
are skipped.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import repeat
from typing import TypeVar

from torch.utils.data import DataLoader, IterableDataset

from training.data.batch import Batch, Shuffle
from training.data.history_selection import HistorySelector
from training.data.label_window import LabelWindow
from training.data.reader import ExampleReader

T = TypeVar("T")
PREFETCH_BATCHES = 2  # batches that a worker reads ahead


class RoundRobin(Iterator[T]):
    """One item of each stream in turn; exhausted streams are skipped.

    `consumed` counts the items of each stream, on top of those that were consumed before. Streams
    that are behind come first, so that an interrupted round continues where it stopped.
    """

    def __init__(
        self, streams: Mapping[int, Iterator[T]], consumed: Mapping[int, int] | None = None
    ) -> None:
        self.consumed = Counter(consumed or {})
        self._streams = streams
        self._queue = deque(sorted(streams, key=lambda key: self.consumed[key]))

    def __next__(self) -> T:
        while self._queue:
            key = self._queue.popleft()
            try:
                item = next(self._streams[key])
            except StopIteration:
                continue
            self._queue.append(key)
            self.consumed[key] += 1
            return item
        raise StopIteration


def round_robin_order(lengths: Sequence[int]) -> list[int]:
    """The stream of each item that `RoundRobin` yields, for streams of these lengths."""
    return list(RoundRobin({n: repeat(n, length) for n, length in enumerate(lengths)}))


def steps_to_pass_end(shards: Sequence[tuple[int, int]], number: int, passes: int) -> int:
    """Steps until the last of the shards that `RoundRobin` reads is through a pass.

    Args:
        shards: The batches of a pass over each shard, some at least, and the batches of all passes
            that were consumed.
        number: The number of the pass, from 1.
        passes: The number of all passes.

    Returns:
        The number of steps; negative if the pass ended before.
    """
    with_rows = [(batches, consumed) for batches, consumed in shards if batches]
    rounds = max(number * batches - consumed for batches, consumed in with_rows)
    return sum(min(rounds, passes * batches - consumed) for batches, consumed in with_rows)


@dataclass(frozen=True)
class Epoch:
    """The arguments of `ExampleReader.batches`: batches to read, and their order.

    The `selector` runs where batches are read.
    """

    days: Sequence[date]
    label_window: LabelWindow
    batch_rows: int
    shuffle: Shuffle
    shard: tuple[int, int] = (0, 1)
    skip_batches: int = 0
    selector: HistorySelector | None = None

    def batches(self, reader: ExampleReader) -> Iterator[Batch]:
        """The batches, read in this process, with the selected events if there is a selector."""
        batches = reader.batches(
            self.days,
            self.label_window,
            self.batch_rows,
            self.shuffle,
            self.shard,
            self.skip_batches,
        )
        return map(self.selector.attach, batches) if self.selector else batches

    def num_batches(self, reader: ExampleReader) -> int:
        """The number of batches, including those to skip; histories are not read."""
        buckets = reader.batch_requests(
            self.days, self.label_window, self.batch_rows, self.shuffle, self.shard
        )
        return sum(len(batches) for _, _, batches in buckets)

    def split(self, parts: int) -> list["Epoch"]:
        """Split the shard into `parts` smaller ones, from their beginning."""
        rank, world = self.shard
        return [
            replace(self, shard=(rank + world * part, world * parts), skip_batches=0)
            for part in range(parts)
        ]


class ShardDataset(IterableDataset[Batch]):
    """The batches of an epoch; each iterating process opens its own reader."""

    def __init__(self, reader: ExampleReader, epoch: Epoch) -> None:
        self._lake = reader.lake
        self._versions = reader.table_versions
        self._reader_options = reader.sequence, reader.max_length, reader.surfaces
        self.epoch = epoch

    def open_reader(self) -> ExampleReader:
        """A reader of the table versions that the dataset was created from."""
        return ExampleReader(self._lake, self._versions, *self._reader_options)

    def __iter__(self) -> Iterator[Batch]:
        return self.epoch.batches(self.open_reader())


def read_epoch(reader: ExampleReader, epoch: Epoch, workers: int) -> Iterator[Batch]:
    """The batches of an epoch, read in this process or by `workers` other processes."""
    if not workers:
        return epoch.batches(reader)
    shards = epoch.split(workers)
    consumed: Counter[int] = Counter()
    if epoch.skip_batches:
        order = round_robin_order([shard.num_batches(reader) for shard in shards])
        consumed.update(order[: epoch.skip_batches])
    streams = {
        n: _worker_batches(reader, replace(shard, skip_batches=consumed[n]))
        for n, shard in enumerate(shards)
    }
    return RoundRobin(streams, consumed)


def _worker_batches(reader: ExampleReader, epoch: Epoch) -> Iterator[Batch]:
    loader = DataLoader(
        ShardDataset(reader, epoch),
        batch_size=None,
        num_workers=1,
        prefetch_factor=PREFETCH_BATCHES,
        multiprocessing_context="spawn",
    )
    return iter(loader)
