"""Histories of a bucket in memory, and the pointer join: slices of many users at once."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from etl.errors import UserError
from etl.tables.arrow import Snapshot
from features.as_of import pointer_holds
from features.history.pack import Events, visible_from

Int64 = npt.NDArray[np.int64]
PACKED = ("gaps", "lags", "items", "surfaces", "types", "dwells")


@dataclass(frozen=True)
class Slices:
    """Ragged positions into `Histories.events`, oldest first, cut by `offsets`."""

    positions: Int64
    offsets: Int64


@dataclass(frozen=True)
class Histories:
    """All stored events of the users (U) of one bucket, in order of visibility.

    `dropped` (U) is how many older events of each were given up; pointers count them.
    """

    users: pa.Array
    events: Events
    dropped: Int64
    codes: tuple[int, ...]

    def slices(self, users: pa.Array, as_of: Int64, length: Int64, most: int) -> Slices:
        """The last `most` of the first `length` events of each user, of the types in `codes`.

        Raises UserError where a pointer no longer cuts its history at its time: the history was
        rewritten after the examples were made, or what they point at is not kept any more.
        """
        user = pc.index_in(users, self.users).fill_null(-1).to_numpy()
        begin, end = self._span(user)
        length = length - np.append(self.dropped, 0)[user]
        if np.any(length < 0):
            raise UserError(
                "histories were compacted, and these examples lie before what is kept of them; "
                "train on later days, or raise most_events or max_age of the spec's history and "
                "make the histories again"
            )
        self._check(begin, end, as_of, length)
        before, kept = self._kept
        first = before[begin]
        last = before[begin + length]
        start = np.maximum(first, last - most)
        positions = kept[_ranges(start, last)]
        return Slices(positions, np.concatenate(([0], np.cumsum(last - start))))

    def _span(self, user: Int64) -> tuple[Int64, Int64]:
        known = user >= 0
        safe = np.where(known, user, 0)
        bounds = self.events.offsets if len(self.events.offsets) > 1 else np.zeros(2, np.int64)
        return np.where(known, bounds[safe], 0), np.where(known, bounds[safe + 1], 0)

    def _check(self, begin: Int64, end: Int64, as_of: Int64, length: Int64) -> None:
        inside = length <= end - begin
        last = begin + np.where(inside, length, 0)
        visible = np.append(self.events.visible_ts, 0)
        seen = np.where(last > begin, visible[last - 1], np.iinfo(np.int64).min)
        unseen = np.where(last < end, visible[last], np.iinfo(np.int64).max)
        if not np.all(inside & pointer_holds(seen, unseen, as_of)):
            raise UserError(
                "histories were rewritten after the examples that point into them were made; "
                "run `gemline features examples` for those days again"
            )

    @cached_property
    def _kept(self) -> tuple[Int64, Int64]:
        """Number of kept events before each position, and the positions of the kept."""
        if not self.codes:
            return np.arange(len(self.events.types) + 1), np.arange(len(self.events.types))
        mask = np.isin(self.events.types, self.codes)
        return np.concatenate(([0], np.cumsum(mask))), np.flatnonzero(mask)


def _ranges(start: Int64, stop: Int64) -> Int64:
    """start[0], start[0]+1, …, stop[0]-1, start[1], …"""
    lengths = stop - start
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(start - (ends - lengths), lengths)


def load_histories(snapshot: Snapshot, bucket: int, codes: tuple[int, ...] = ()) -> Histories:
    """The histories of one bucket; `codes` are the event types to keep, all where empty."""
    table = snapshot.read(
        ["user_id", "day", "chunk", "dropped", "first_ts", *PACKED], bucket=bucket
    )
    order = [(name, "ascending") for name in ("user_id", "day", "chunk")]
    table = table.sort_by(order).combine_chunks()
    flat = {name: table[name].combine_chunks().flatten().to_numpy() for name in PACKED}
    lengths = pc.list_value_length(table["gaps"]).to_numpy()
    rows = np.concatenate(([0], np.cumsum(lengths)))
    users, starts = _distinct(table["user_id"].combine_chunks())
    visible = visible_from(table["first_ts"].to_numpy(), flat["gaps"], rows)
    events = Events(
        offsets=np.append(rows[starts], rows[-1]),
        visible_ts=visible,
        event_ts=visible - flat["lags"],
        items=flat["items"],
        surfaces=flat["surfaces"],
        types=flat["types"],
        dwells=flat["dwells"],
    )
    dropped = np.add.reduceat(table["dropped"].to_numpy(), starts) if len(starts) else starts
    return Histories(users, events, dropped.astype(np.int64), codes)


def _distinct(sorted_ids: pa.Array) -> tuple[pa.Array, Int64]:
    encoded = pc.run_end_encode(sorted_ids)
    ends = encoded.run_ends.to_numpy()
    return encoded.values, np.concatenate(([0], ends[:-1])).astype(np.int64)
