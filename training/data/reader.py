"""The reader: days of examples to batches, the same ones for the same seed, from any position."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date

import numpy as np
import numpy.typing as npt
import torch

from etl.errors import UserError
from etl.spec.units import each_day
from etl.tables import contracts
from etl.tables.arrow import Snapshot, snapshot
from etl.tables.lake import Lake
from features.inputs import Features, features_of
from features.ranges import ranges
from training.data.batch import Batch, History
from training.data.chunks import Chunk, load_chunk
from training.data.histories import Histories, load_histories
from training.data.items import ItemTable, load_items
from training.data.parts import Shuffle
from training.data.ripened import Ripened

Int64 = npt.NDArray[np.int64]
TABLES = ("examples", "impressions", "history", "items", "item_versions")


@dataclass
class Reader:
    """Pinned versions of the tables that training reads.

    `sequence` names the spec's sequence that histories are cut to; `max_length` overrides its
    length, and 0 reads no history. Rows of other surfaces than `surfaces` are left out, if any are
    named. Raises UserError for a sequence that the spec lacks.
    """

    lake: Lake
    versions: Mapping[str, int]
    sequence: str
    max_length: int | None = None
    surfaces: tuple[str, ...] = ()
    features: Features = field(init=False)
    items: ItemTable = field(init=False)
    _tables: dict[str, Snapshot] = field(init=False)
    _histories: dict[int, Histories] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        spec = self.lake.spec
        if self.sequence not in spec.sequences:
            known = ", ".join(spec.sequences)
            raise UserError(f"spec {spec.name} has no sequence {self.sequence!r}; known: {known}")
        self.features = features_of(spec)
        made = {name: getattr(contracts, name)(spec) for name in TABLES}
        self._tables = {n: snapshot(self.lake, c, self.versions[n]) for n, c in made.items()}
        index, told = self._tables["items"], self._tables["item_versions"]
        self.items = load_items(index, told, self.features.item)

    @classmethod
    def newest(
        cls,
        lake: Lake,
        sequence: str | None = None,
        max_length: int | None = None,
        surfaces: tuple[str, ...] = (),
    ) -> "Reader":
        """A reader of the newest versions; `sequence` may be left out where the spec has one."""
        if sequence is None:
            sequence, *others = lake.spec.sequences
            if others:
                known = ", ".join(lake.spec.sequences)
                raise UserError(f"--sequence: name one of the spec's sequences: {known}")
        versions = {name: lake.version(name) for name in TABLES}
        return cls(lake, versions, sequence, max_length, surfaces)

    @property
    def length(self) -> int:
        """Events that a history is cut to."""
        own = self.lake.spec.sequences[self.sequence].max_length
        return own if self.max_length is None else self.max_length

    @property
    def events(self) -> tuple[str, ...]:
        """Types of events that a history holds; empty for all."""
        return self.lake.spec.sequences[self.sequence].events or ()

    def days(self) -> list[date]:
        """Days that have examples."""
        return self._tables["examples"].days()

    def require(self, first: date, last: date) -> None:
        """Raises UserError where a day from first to last has no examples."""
        there = self.days()
        missing = [str(day) for day in each_day(first, last) if day not in there]
        if missing:
            raise UserError(
                f"no examples of {', '.join(missing)}; run `gemline features examples` for them"
            )

    def chunks(
        self, days: Sequence[date], buckets: Iterable[int], ripened: Ripened
    ) -> Iterator[tuple[int, Chunk]]:
        """The chunks of some days that have rows, in the order of `buckets`, with their bucket."""
        for bucket in buckets:
            chunk = load_chunk(
                self.lake.spec,
                self.features,
                self._tables["examples"],
                self._tables["impressions"],
                days,
                bucket,
                ripened,
                [self.lake.spec.surface_codes[name] for name in self.surfaces],
            )
            if chunk is not None:
                yield bucket, chunk

    def batches(
        self,
        days: Sequence[date],
        ripened: Ripened,
        rows: int,
        shuffle: Shuffle,
        shard: tuple[int, int] = (0, 1),
        skip: int = 0,
    ) -> Iterator[Batch]:
        """Batches of about `rows` impressions and even cost, requests whole; the days are mixed.

        A slow objective's label ripens days after the others: batches of one day alone would hold
        only some objectives, and the last ones seen would drown the rest. `shard` is (rank,
        world): a rank owns the buckets of its remainder. `skip` leaves out that many batches at
        the start, without reading their histories.
        """
        for bucket, chunk, parts in self.parts(days, ripened, rows, shuffle, shard):
            left_out = min(skip, len(parts))
            skip -= left_out
            if len(parts) > left_out:
                histories = self._bucket(bucket)
                user = histories.find(chunk.users)
                for part in parts[left_out:]:
                    yield self._assemble(chunk, part, histories, user)

    def parts(
        self,
        days: Sequence[date],
        ripened: Ripened,
        rows: int,
        shuffle: Shuffle,
        shard: tuple[int, int],
    ) -> Iterator[tuple[int, Chunk, list[Int64]]]:
        """Each bucket of a shard, its chunk, and the requests of each of its batches.

        No history is read.
        """
        rank, world = shard
        salt = days[-1].toordinal()
        buckets = np.arange(rank, self.lake.spec.buckets, world)
        for bucket, chunk in self.chunks(days, shuffle(buckets, salt, len(buckets)), ripened):
            events = np.minimum(chunk.length, self.length)
            yield bucket, chunk, shuffle.parts(np.diff(chunk.starts), events, rows, salt, bucket)

    def _assemble(self, chunk: Chunk, requests: Int64, histories: Histories, user: Int64) -> Batch:
        """The batch of some requests of a chunk; `user` (R) are its users in the histories."""
        begin, end = chunk.starts[requests], chunk.starts[requests + 1]
        counts = end - begin
        rows = ranges(begin, end)
        item = chunk.item[rows]
        group = self.features.item
        known = self.items.versions_at(item, np.repeat(chunk.as_of[requests], counts))
        item_numbers = self.items.numbers[known]
        users, context = self.features.user.ids, self.features.context.ids
        return Batch(
            request=torch.from_numpy(np.repeat(np.arange(len(requests)), counts)),
            as_of=torch.from_numpy(chunk.as_of[requests]),
            surface=torch.from_numpy(chunk.surface[rows]),
            item=torch.from_numpy(item),
            user=torch.from_numpy(chunk.user_hashes[requests]),
            user_ids={name: torch.from_numpy(chunk.ids[name][begin]) for name in users},
            user_numbers=torch.from_numpy(chunk.user_numbers[begin]),
            row_ids={name: torch.from_numpy(self.items.ids[name][known]) for name in group.ids}
            | {name: torch.from_numpy(chunk.ids[name][rows]) for name in context},
            row_numbers=torch.from_numpy(np.concatenate((item_numbers, chunk.numbers[rows]), 1)),
            row_vectors={n: torch.from_numpy(v[known]) for n, v in self.items.vectors.items()},
            history=self._history(chunk, requests, histories, user),
            labels=torch.from_numpy(chunk.labels[rows]),
            known=torch.from_numpy(chunk.known[rows]),
            values=torch.from_numpy(chunk.values[rows]),
            impressions=chunk.impressions[rows],
            requests=chunk.requests[requests],
            users=chunk.user_names[requests],
        )

    def _history(self, chunk: Chunk, requests: Int64, stored: Histories, user: Int64) -> History:
        as_of = chunk.as_of[requests]
        cut = stored.slices(user[requests], as_of, chunk.length[requests], self.length)
        events = cut.events
        items = np.minimum(events["item"].astype(np.int64), len(self.items) - 1)
        now = np.repeat(as_of, np.diff(cut.offsets))
        known = self.items.versions_at(items, now)
        return History(
            offsets=torch.from_numpy(cut.offsets),
            items=torch.from_numpy(items),
            surfaces=torch.from_numpy(events["surface"].astype(np.int64)),
            types=torch.from_numpy(events["type"].astype(np.int64)),
            dwells=torch.from_numpy(events["dwell"].astype(np.int64)),
            ages=torch.from_numpy(now - events["visible_ts"]),
            item_ids={n: torch.from_numpy(v[known]) for n, v in self.items.ids.items()},
            item_vectors={n: torch.from_numpy(v[known]) for n, v in self.items.vectors.items()},
        )

    def _bucket(self, bucket: int) -> Histories:
        if bucket not in self._histories:
            codes = tuple(self.lake.spec.event_codes[name] for name in self.events)
            self._histories[bucket] = load_histories(self._tables["history"], bucket, codes)
        return self._histories[bucket]
