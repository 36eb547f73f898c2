"""Features and batches of a log: counts before each entry, and rows with their users' histories.

Only strictly earlier entries are read; entries of the same second do not affect each other.

N entries, B rows, E events of C chunks, M numbers of T segments.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from benchmarks.public.quantile_encoding import SEGMENTS
from benchmarks.public.sequence_data import POSITIVE, SPLITS, UNLABELLED, Attribute, InteractionLog
from etl.array_types import Float32, Float64, Int64
from training.model.numeric import quantile_edges
from training.ops.ragged import concat_ranges

PRIOR_COUNT = 5.0  # prior labels that smooth a rate
RECENT_ENTRIES = 20
CHUNK_ENTRIES = 128  # consecutive entries that share one encoded history
LOOKBACK_ENTRIES = 384  # entries read before a chunk
BATCH_ROWS = 512


def count_features(log: InteractionLog) -> Float32:
    """Earlier counts and positive rates (N, M), by user, item and each item attribute."""
    labeled = (log.label != UNLABELLED).astype(np.float64)
    positive = (log.label == POSITIVE).astype(np.float64)
    is_train = log.split == SPLITS.index("train")
    prior_rate = float(positive[is_train].mean())
    entry_counts = np.stack((np.ones(len(log)), labeled, positive), 1)
    user = sums_before(log.user_code, log.time, entry_counts)
    item = sums_before(log.item_code, log.time, entry_counts)
    user_rate = (user[:, 2] + PRIOR_COUNT * prior_rate) / (user[:, 1] + PRIOR_COUNT)
    item_rate = (item[:, 2] + PRIOR_COUNT * prior_rate) / (item[:, 1] + PRIOR_COUNT)
    columns = [
        *(np.log1p(counts[:, i]) for counts in (user, item) for i in (0, 1)),
        user_rate,
        item_rate,
        recent_positive_rate(log, entry_counts, user_rate),
        np.log1p(seconds_since_last(log)),
    ]
    for attribute in log.item_attributes.values():
        columns += attribute_affinity(log, attribute, entry_counts[:, 1:], user_rate)
    return np.stack(columns, 1).astype(np.float32)


def sums_before(key: Int64, time: Float64, values: Float64) -> Float64:
    """Sums (N, k) of the values of the entries with the same key and an earlier time."""
    order = np.lexsort((time, key))
    sums = np.concatenate((np.zeros((1, values.shape[1])), values[order].cumsum(0)))
    is_new_key = np.append(True, key[order][1:] != key[order][:-1])
    is_new_time = is_new_key | np.append(True, time[order][1:] != time[order][:-1])
    positions = np.arange(len(order))
    key_start = np.maximum.accumulate(np.where(is_new_key, positions, 0))
    time_start = np.maximum.accumulate(np.where(is_new_time, positions, 0))
    earlier_sums = np.empty_like(values)
    earlier_sums[order] = sums[time_start] - sums[key_start]
    return earlier_sums


def prior_entry_counts(log: InteractionLog) -> Int64:
    """The number of earlier entries of the same user (N)."""
    return sums_before(log.user_code, log.time, np.ones((len(log), 1)))[:, 0].astype(np.int64)


def recent_positive_rate(
    log: InteractionLog, entry_counts: Float64, user_positive_rate: Float64
) -> Float64:
    """The positive rate (N) of a user's last entries, smoothed towards that over all of them."""
    first = log.user_offsets[log.user_code]
    stop = first + prior_entry_counts(log)
    sums = np.concatenate((np.zeros((1, entry_counts.shape[1])), entry_counts.cumsum(0)))
    recent: Float64 = sums[stop] - sums[np.maximum(first, stop - RECENT_ENTRIES)]
    return (recent[:, 2] + PRIOR_COUNT * user_positive_rate) / (recent[:, 1] + PRIOR_COUNT)


def seconds_since_last(log: InteractionLog) -> Float64:
    """Seconds (N) since the user's last earlier entry; 0 for the first."""
    counts = prior_entry_counts(log)
    previous = log.time[log.user_offsets[log.user_code] + np.maximum(counts - 1, 0)]
    return np.where(counts > 0, log.time - previous, 0.0)


def attribute_affinity(
    log: InteractionLog, attribute: Attribute, label_counts: Float64, user_positive_rate: Float64
) -> Iterator[Float64]:
    """The user's earlier labeled entries (N) with the values of an item, and their positive rate.

    Means over the values of the item; `label_counts` (N, 2) are labeled and positive entries.
    """
    entry, value = explode_values(attribute, log.item_code)
    key = log.user_code[entry] * attribute.num_values + value
    labeled, positive = sums_before(key, log.time[entry], label_counts[entry]).T
    rate = (positive + PRIOR_COUNT * user_positive_rate[entry]) / (labeled + PRIOR_COUNT)
    num_values = np.bincount(entry, minlength=len(log))
    yield np.bincount(entry, np.log1p(labeled), len(log)) / num_values
    yield np.bincount(entry, rate, len(log)) / num_values


def explode_values(attribute: Attribute, entity_codes: Int64) -> tuple[Int64, Int64]:
    """All pairs of a position in `entity_codes` and a value of that entity, as two arrays."""
    counts = np.diff(attribute.offsets)[entity_codes]
    position = np.repeat(np.arange(len(entity_codes)), counts)
    within = np.arange(len(position)) - np.repeat(np.cumsum(counts) - counts, counts)
    return position, attribute.values[attribute.offsets[entity_codes][position] + within]


@dataclass(frozen=True)
class EntryFeatures:
    """Features of entries (n) except for their labels; `numeric` is (n, M).

    `user` and `item` are vocabulary indexes; `user_code` and `item_code` select attributes.
    """

    user: Tensor
    user_code: Tensor
    item: Tensor
    item_code: Tensor
    numeric: Tensor

    def select(self, positions: Tensor) -> "EntryFeatures":
        """The features at some positions."""
        return EntryFeatures(*(getattr(self, field.name)[positions] for field in fields(self)))


@dataclass(frozen=True)
class SequenceBatch:
    """Rows (B) sorted by `chunk` (B), and the `events` (E) of chunks, delimited by `offsets` (C+1).

    A row sees the first `visible_events` (B) of its chunk. `labels` (E) are those of the events.
    """

    rows: EntryFeatures
    chunk: Tensor
    visible_events: Tensor
    events: EntryFeatures
    labels: Tensor
    offsets: Tensor


class SequenceDataset:
    """A log as tensors, and its rows of each split."""

    def __init__(self, log: InteractionLog) -> None:
        self.log = log
        arrays = (log.user, log.user_code, log.item, log.item_code, count_features(log))
        self.entries = EntryFeatures(*(torch.from_numpy(np.ascontiguousarray(x)) for x in arrays))
        self.labels = torch.from_numpy(log.label)
        self.prior_entries = torch.from_numpy(prior_entry_counts(log))
        self.user_start = torch.from_numpy(log.user_offsets)[self.entries.user_code]

    @cached_property
    def edges(self) -> Tensor:
        """The quantiles (M, T + 1) of the numbers of the training rows."""
        is_train = torch.from_numpy(self.log.split == SPLITS.index("train"))
        return quantile_edges(self.entries.numeric[is_train], SEGMENTS)

    def chunk_ids(self, rows: Tensor) -> Tensor:
        """An id (B) shared only by rows of the same chunk; `rows` (B) are sorted positions."""
        position = rows - self.user_start[rows]
        return self.user_start[rows] + position // CHUNK_ENTRIES

    def batch(self, rows: Tensor) -> SequenceBatch:
        """A batch of rows by position (B); rows of a chunk must be adjacent, oldest first."""
        _, chunk, counts = torch.unique_consecutive(
            self.chunk_ids(rows), return_inverse=True, return_counts=True
        )
        newest = rows[counts.cumsum(0) - 1]
        first, stop = self.user_start[newest], self.prior_entries[newest]
        chunk_start = (newest - first) // CHUNK_ENTRIES * CHUNK_ENTRIES
        begin = (chunk_start - LOOKBACK_ENTRIES).clamp(min=0).minimum(stop)
        events, offsets = concat_ranges(first + begin, stop - begin)
        return SequenceBatch(
            rows=self.entries.select(rows),
            chunk=chunk,
            visible_events=(self.prior_entries[rows] - begin[chunk]).clamp(min=0),
            events=self.entries.select(events),
            labels=self.labels[events],
            offsets=offsets,
        )


Batch = tuple[tuple[SequenceBatch], Tensor]


@dataclass(frozen=True)
class SplitRows:
    """The rows of a split, in batches of whole chunks."""

    dataset: SequenceDataset
    split: int

    def shuffled(self, generator: torch.Generator) -> Iterator[Batch]:
        """Batches of all rows, chunks in random order."""
        chunks = self._chunks()
        order = torch.randperm(len(chunks), generator=generator).tolist()
        return self._batches([chunks[i] for i in order])

    def in_order(self) -> Iterator[Batch]:
        """Batches in the order of the log."""
        return self._batches(self._chunks())

    def _chunks(self) -> list[Tensor]:
        """Positions of the rows of each chunk."""
        rows = torch.from_numpy(np.flatnonzero(self.dataset.log.split == self.split))
        _, counts = torch.unique_consecutive(self.dataset.chunk_ids(rows), return_counts=True)
        return list(torch.split(rows, counts.tolist()))

    def _batches(self, chunks: Sequence[Tensor]) -> Iterator[Batch]:
        ends = np.cumsum([len(chunk) for chunk in chunks])
        for batch in np.split(np.arange(len(chunks)), _batch_boundaries(ends)):
            rows = torch.cat([chunks[i] for i in batch])
            yield (self.dataset.batch(rows),), (self.dataset.labels[rows] == POSITIVE).float()


def _batch_boundaries(ends: Int64) -> Int64:
    """Chunks at which batches of about BATCH_ROWS rows begin; `ends` are cumulative row counts."""
    return np.flatnonzero(np.diff((ends - 1) // BATCH_ROWS)) + 1
