"""Reads days of examples as batches, reproducibly by seed and from any position."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from etl.array_types import Int64
from etl.errors import UserError
from etl.spec.units import date_range
from etl.tables import schemas
from etl.tables.arrow import Snapshot, snapshot
from etl.tables.lake import Lake
from features.encoding.vectors import VectorColumn
from features.ragged import concat_ranges
from features.schema import FeatureSchema, feature_schema
from training.data.batch import Batch, History, Shuffle
from training.data.histories import HistoryCache, NeededEvents, UserHistories
from training.data.items import ItemTable, load_items
from training.data.label_window import LabelWindow
from training.data.partition import ExamplePartition, PartitionLoader

MAX_HISTORY_BYTES = 1 << 28  # of the histories that a reader keeps, beside those it reads
INPUT_TABLES = ("examples", "impressions", "history", "items", "item_versions")


@dataclass
class ExampleReader:
    """Reads examples from pinned versions of the tables.

    Histories are those of the spec's sequence `sequence`; `max_length` overrides its length, and 0
    reads no history. If `surfaces` is not empty, impressions of other surfaces are skipped.
    Raises UserError if the spec does not have the sequence.
    """

    lake: Lake
    table_versions: Mapping[str, int]
    sequence: str
    max_length: int | None = None
    surfaces: tuple[str, ...] = ()
    features: FeatureSchema = field(init=False)
    items: ItemTable = field(init=False)
    _tables: dict[str, Snapshot] = field(init=False)
    _partitions: PartitionLoader = field(init=False)
    _histories: HistoryCache = field(init=False)

    def __post_init__(self) -> None:
        spec = self.lake.spec
        if self.sequence not in spec.sequences:
            known = ", ".join(spec.sequences)
            raise UserError(f"spec {spec.name} has no sequence {self.sequence!r}; known: {known}")
        for surface in self.surfaces:
            spec.require_ad_surface(surface)
        self.features = feature_schema(spec)
        self._tables = {
            name: snapshot(self.lake, schemas.table_schema(spec, name), self.table_versions[name])
            for name in INPUT_TABLES
        }
        self.items = load_items(
            self._tables["items"], self._tables["item_versions"], self.features.item
        )
        codes = tuple(spec.event_codes[name] for name in self.event_types)
        self._histories = HistoryCache(self._tables["history"], codes, MAX_HISTORY_BYTES)
        self._partitions = PartitionLoader(
            spec,
            self.features,
            self._tables["examples"],
            self._tables["impressions"],
            [spec.surface_codes[name] for name in self.surfaces],
        )

    @classmethod
    def latest(
        cls,
        lake: Lake,
        sequence: str | None = None,
        max_length: int | None = None,
        surfaces: tuple[str, ...] = (),
    ) -> "ExampleReader":
        """A reader of the latest versions.

        `sequence` may be None if the spec has only one, or if no history is read.
        """
        if sequence is None:
            sequence, *others = lake.spec.sequences
            if others and max_length != 0:
                known = ", ".join(lake.spec.sequences)
                raise UserError(f"--sequence is missing: name one of the spec's sequences: {known}")
        versions = {name: lake.version(name) for name in INPUT_TABLES}
        return cls(lake, versions, sequence, max_length, surfaces)

    @property
    def history_length(self) -> int:
        """The maximum number of events of a history."""
        default = self.lake.spec.sequences[self.sequence].max_length
        return default if self.max_length is None else self.max_length

    @property
    def event_types(self) -> tuple[str, ...]:
        """Types of the events in a history; empty for all."""
        return self.lake.spec.sequences[self.sequence].events or ()

    def days(self) -> list[date]:
        """The days with examples."""
        return self._tables["examples"].days()

    def require_days(self, first: date, last: date) -> None:
        """Raises UserError if examples of a day from `first` to `last` are missing."""
        missing = [str(day) for day in self.missing_days(first, last)]
        if missing:
            raise UserError(
                f"no examples of {', '.join(missing)}; run `gemline features examples` for them"
            )

    def missing_days(self, first: date, last: date) -> list[date]:
        """The days from `first` to `last` without examples that may have impressions.

        A day that has been ingested and on which no impression was logged needs no examples.
        """
        existing = set(self.days())
        absent = [day for day in date_range(first, last) if day not in existing]
        return [day for day in absent if _may_have_impressions(self.lake, day)]

    def partitions(
        self, days: Sequence[date], buckets: Iterable[int], label_window: LabelWindow
    ) -> Iterator[tuple[int, ExamplePartition]]:
        """The buckets with rows, in the given order, each with its partition."""
        for bucket in buckets:
            partition = self._partitions.load(days, bucket, label_window)
            if partition is not None:
                yield bucket, partition

    def batches(
        self,
        days: Sequence[date],
        label_window: LabelWindow,
        batch_rows: int,
        shuffle: Shuffle,
        shard: tuple[int, int] = (0, 1),
        skip_batches: int = 0,
    ) -> Iterator[Batch]:
        """Batches of about `batch_rows` impressions and of even cost; requests are not split.

        Yields nothing if there are no days.

        All days are mixed, because labels of slow objectives mature days after the others: batches
        of a single day would hold only some of the objectives.

        Args:
            days: Days of the impressions.
            label_window: Which labels to use; impressions without one are skipped.
            batch_rows: Impressions per batch, approximately.
            shuffle: The order of the batches.
            shard: (rank, world): read the buckets whose number modulo `world` is `rank`.
            skip_batches: Batches to skip at the start; their histories are not read.
        """
        for bucket, partition, batches in self.batch_requests(
            days, label_window, batch_rows, shuffle, shard
        ):
            skipped = min(skip_batches, len(batches))
            skip_batches -= skipped
            if len(batches) > skipped:
                histories = self._load_histories(bucket, partition)
                user_positions = histories.user_positions(partition.user_ids)
                for requests in batches[skipped:]:
                    yield self._build_batch(partition, requests, histories, user_positions)

    def batch_requests(
        self,
        days: Sequence[date],
        label_window: LabelWindow,
        batch_rows: int,
        shuffle: Shuffle,
        shard: tuple[int, int],
    ) -> Iterator[tuple[int, ExamplePartition, list[Int64]]]:
        """Each bucket of a shard, its partition, and the requests of each of its batches.

        Histories are not read.
        """
        if not days:
            return
        rank, world = shard
        salt = days[-1].toordinal()
        buckets = np.arange(rank, self.lake.spec.buckets, world)
        order = shuffle(buckets, salt, len(buckets))
        for bucket, partition in self.partitions(days, order, label_window):
            sizes = np.diff(partition.request_offsets)
            events = np.minimum(partition.history_length, self.history_length)
            yield bucket, partition, shuffle.split(sizes, events, batch_rows, salt, bucket)

    def _build_batch(
        self,
        partition: ExamplePartition,
        requests: Int64,
        histories: UserHistories,
        user_positions: Int64,
    ) -> Batch:
        """The batch of some requests of a partition.

        `user_positions` (R) are the places of all its users in the histories.
        """
        first, stop = partition.request_offsets[requests], partition.request_offsets[requests + 1]
        counts = stop - first
        rows = concat_ranges(first, stop)
        item = partition.item_index[rows]
        version = self.items.versions_at(item, np.repeat(partition.as_of[requests], counts))
        user, context = self.features.user, self.features.context
        row_numeric = np.concatenate((self.items.numeric[version], partition.numeric[rows]), 1)
        return Batch(
            request_index=torch.from_numpy(np.repeat(np.arange(len(requests)), counts)),
            as_of=torch.from_numpy(partition.as_of[requests]),
            surface=torch.from_numpy(partition.surface[rows]),
            item_index=torch.from_numpy(item),
            user_hash=torch.from_numpy(partition.user_hashes[requests]),
            user_categorical=_tensors(partition.categorical, user.categorical, first),
            user_numeric=torch.from_numpy(partition.user_numeric[first]),
            user_vectors=_tensors(partition.vectors, user.vectors, first),
            row_categorical=_tensors(self.items.categorical, self.items.categorical, version)
            | _tensors(partition.categorical, context.categorical, rows),
            row_numeric=torch.from_numpy(row_numeric),
            row_vectors=_tensors(self.items.vectors, self.items.vectors, version),
            context_vectors=_tensors(partition.vectors, context.vectors, rows),
            history=self._build_history(partition, requests, histories, user_positions),
            labels=torch.from_numpy(partition.labels[rows]),
            label_mask=torch.from_numpy(partition.label_mask[rows]),
            outcome_values=torch.from_numpy(partition.outcome_values[rows]),
            extra_labels=torch.from_numpy(partition.extra_labels[rows]),
            extra_mask=torch.from_numpy(partition.extra_mask[rows]),
            impression_ids=partition.impression_ids[rows],
            request_ids=partition.request_ids[requests],
            user_ids=partition.user_ids_array[requests],
            swap_weights=torch.from_numpy(partition.swap_weights[rows]),
        )

    def _build_history(
        self,
        partition: ExamplePartition,
        requests: Int64,
        histories: UserHistories,
        user_positions: Int64,
    ) -> History:
        """The histories of some requests, with item attributes as of the time of the request."""
        as_of = partition.as_of[requests]
        slices = histories.slices(
            user_positions[requests], as_of, partition.history_length[requests], self.history_length
        )
        events = slices.events
        items = np.minimum(events["item"].astype(np.int64), len(self.items) - 1)
        event_as_of = np.repeat(as_of, np.diff(slices.offsets))
        version = self.items.versions_at(items, event_as_of)
        return History(
            offsets=torch.from_numpy(slices.offsets),
            item_index=torch.from_numpy(items),
            surfaces=torch.from_numpy(events["surface"].astype(np.int64)),
            types=torch.from_numpy(events["type"].astype(np.int64)),
            dwells=torch.from_numpy(events["dwell"].astype(np.int64)),
            age_seconds=torch.from_numpy(event_as_of - events["visible_ts"]),
            attributes={
                name: torch.from_numpy(events[name].astype(np.int64))
                for name in self.features.history_attributes
            },
            item_categorical=_tensors(self.items.categorical, self.items.categorical, version),
            item_vectors=_tensors(self.items.vectors, self.items.vectors, version),
        )

    def _load_histories(self, bucket: int, partition: ExamplePartition) -> UserHistories:
        """The events of a bucket that the requests of a partition read."""
        # How many of the events before a pointer are of some types is not known before reading.
        max_events = None if self.event_types else self.history_length
        needed = NeededEvents.of_requests(partition.user_ids, partition.history_length, max_events)
        return self._histories.load(bucket, needed)


def _may_have_impressions(lake: Lake, day: date) -> bool:
    """Whether impressions of a day were logged, or the day has not been ingested."""
    if day not in lake.rows_by_day("ingest_metrics"):
        return True
    events = snapshot(lake, schemas.table_schema(lake.spec, "events"))
    types = events.read(["type"], day=day)["type"].unique().to_pylist()
    return lake.spec.event_codes[lake.spec.impression_type] in types


def _tensors(
    columns: Mapping[str, npt.NDArray[Any]] | Mapping[str, VectorColumn],
    names: Iterable[str],
    rows: Int64,
) -> dict[str, torch.Tensor]:
    """Some rows (n) of some columns."""
    return {name: torch.from_numpy(columns[name][rows]) for name in names}
