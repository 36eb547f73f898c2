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
from features.history.planes import WIDTHS, planes, unpack

Int64 = npt.NDArray[np.int64]
# What a model reads of an event, side by side: a slice of a history is then one copy.
EVENT = np.dtype(
    [("visible_ts", "<i8"), ("item", "<i4"), ("surface", "i1"), ("type", "i1"), ("dwell", "i1"),
     ("unused", "i1")]
)  # fmt: skip


@dataclass(frozen=True)
class Slices:
    """Ragged `events` of type EVENT, oldest first, cut by `offsets`."""

    events: npt.NDArray[np.void]
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

    def find(self, users: pa.Array) -> Int64:
        """The number of each user here, -1 of those without events."""
        return pc.index_in(users, self.users).fill_null(-1).to_numpy().astype(np.int64)

    def slices(self, user: Int64, as_of: Int64, length: Int64, most: int) -> Slices:
        """The last `most` of the first `length` events of each user, of the types in `codes`.

        Raises UserError where a pointer no longer cuts its history at its time: the history was
        rewritten after the examples were made, or what they point at is not kept any more.
        """
        begin, end = self._bounds[user], self._bounds[user + 1]
        end = np.where(user < 0, begin, end)
        length = length - self._dropped[user]
        if np.any(length < 0):
            raise UserError(
                "histories were compacted, and these examples lie before what is kept of them; "
                "train on later days, or raise most_events or max_age of the spec's history and "
                "make the histories again"
            )
        self._check(begin, end, as_of, length)
        first, last = begin, begin + length
        if self.codes:
            first, last = self._kept_before[first], self._kept_before[last]
        start = np.maximum(first, last - most)
        runs = pa.LargeListViewArray.from_arrays(start, last - start, self._kept).flatten()
        _, data = runs.buffers()
        events = np.ndarray(len(runs), EVENT, data, runs.offset * EVENT.itemsize)
        return Slices(events, np.concatenate(([0], np.cumsum(last - start))))

    def _check(self, begin: Int64, end: Int64, as_of: Int64, length: Int64) -> None:
        inside = length <= end - begin
        last = begin + np.where(inside, length, 0)
        seen = np.where(last > begin, self._visible[last - 1], np.iinfo(np.int64).min)
        unseen = np.where(last < end, self._visible[last], np.iinfo(np.int64).max)
        if not np.all(inside & pointer_holds(seen, unseen, as_of)):
            raise UserError(
                "histories were rewritten after the examples that point into them were made; "
                "run `gemline features examples` for those days again"
            )

    @cached_property
    def _bounds(self) -> Int64:
        """`offsets`, and one more: user -1 ends where it begins."""
        return np.append(self.events.offsets, self.events.offsets[-1])

    @cached_property
    def _dropped(self) -> Int64:
        return np.append(self.dropped, 0)

    @cached_property
    def _visible(self) -> Int64:
        return np.append(self.events.visible_ts, 0)

    @cached_property
    def _kept(self) -> pa.FixedSizeBinaryArray:
        """The events of the types in `codes`, as bytes of EVENT."""
        stored = self.events
        rows = np.zeros(len(stored.items), EVENT)
        rows["visible_ts"], rows["item"] = stored.visible_ts, stored.items
        rows["surface"], rows["type"], rows["dwell"] = (
            stored.surfaces, stored.types, stored.dwells
        )  # fmt: skip
        if self.codes:
            rows = rows[self._wanted]
        shape = pa.binary(EVENT.itemsize)
        return pa.FixedSizeBinaryArray.from_buffers(shape, len(rows), [None, pa.py_buffer(rows)])

    @cached_property
    def _kept_before(self) -> Int64:
        """How many kept events lie before each position."""
        return np.concatenate(([0], np.cumsum(self._wanted)))

    @cached_property
    def _wanted(self) -> npt.NDArray[np.bool_]:
        """Whether each event is of the types in `codes`."""
        return np.isin(self.events.types, self.codes)


def load_histories(snapshot: Snapshot, bucket: int, codes: tuple[int, ...] = ()) -> Histories:
    """The histories of one bucket; `codes` are the event types to keep, all where empty."""
    read = [column for name in WIDTHS if name != "lags" for column in planes(name)]
    columns = ["user_id", "day", "chunk", "dropped", "first_ts", "events", *read]
    return unpacked(snapshot.read(columns, bucket=bucket), codes)


def unpacked(table: pa.Table, codes: tuple[int, ...] = ()) -> Histories:
    """Rows of the history table in any order, as histories."""
    order = [(name, "ascending") for name in ("user_id", "day", "chunk")]
    table = table.sort_by(order).combine_chunks()
    lengths = table["events"].to_numpy().astype(np.int64)
    flat = unpack(table, lengths)
    rows = np.concatenate(([0], np.cumsum(lengths)))
    users, starts = _distinct(table["user_id"].combine_chunks())
    visible = visible_from(table["first_ts"].to_numpy(), flat["gaps"], rows)
    events = Events(
        offsets=np.append(rows[starts], rows[-1]),
        visible_ts=visible,
        lags=flat.get("lags"),
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
