"""Histories of a bucket in memory, and the pointer join: slices for many requests at once."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from etl.errors import UserError
from etl.tables.arrow import Snapshot
from features.history.codec import BYTE_WIDTHS, UserEvents, decode_rows, delta_decode, plane_columns
from features.ragged import is_pointer_valid

Int64 = npt.NDArray[np.int64]
# The columns of an event that a model reads, as one struct: slicing a history is then one copy.
EVENT_DTYPE = np.dtype(
    [("visible_ts", "<i8"), ("item", "<i4"), ("surface", "i1"), ("type", "i1"), ("dwell", "i1"),
     ("unused", "i1")]
)  # fmt: skip


@dataclass(frozen=True)
class HistorySlices:
    """Ragged `events` of EVENT_DTYPE, oldest first, cut by `offsets` (R+1)."""

    events: npt.NDArray[np.void]
    offsets: Int64


@dataclass(frozen=True)
class UserHistories:
    """All stored events of the users (U) of one bucket, in order of visibility.

    `dropped_events` (U) counts the older events that compaction removed; history pointers include
    them. Slices hold the events of `event_types` (codes), or all events if it is empty.
    """

    users: pa.Array
    events: UserEvents
    dropped_events: Int64
    event_types: tuple[int, ...]

    def user_positions(self, users: pa.Array) -> Int64:
        """The position of each user (n), -1 for users without events."""
        positions = pc.index_in(users, self.users).fill_null(-1)
        return np.asarray(positions.to_numpy(), np.int64)

    def slices(self, users: Int64, as_of: Int64, length: Int64, max_events: int) -> HistorySlices:
        """The last `max_events` of the first `length` events of each request's user (R).

        Raises UserError if a pointer (`length`) no longer cuts its history at `as_of`, because the
        history was rewritten or compacted after the examples were built.
        """
        begin, end = self._offsets[users], self._offsets[users + 1]
        end = np.where(users < 0, begin, end)
        length = length - self._dropped[users]
        if np.any(length < 0):
            raise UserError(
                "histories were compacted, and these examples point at events that were removed; "
                "train on later days, or raise max_events or max_age of the spec's history and "
                "build the histories again"
            )
        self._check_pointers(begin, end, as_of, length)
        first, last = begin, begin + length
        if self.event_types:
            first, last = self._selected_before[first], self._selected_before[last]
        start = np.maximum(first, last - max_events)
        runs = pa.LargeListViewArray.from_arrays(
            start, last - start, self._selected_events
        ).flatten()
        _, data = runs.buffers()
        events = np.ndarray(len(runs), EVENT_DTYPE, data, runs.offset * EVENT_DTYPE.itemsize)
        return HistorySlices(events, np.concatenate(([0], np.cumsum(last - start))))

    def _check_pointers(self, begin: Int64, end: Int64, as_of: Int64, length: Int64) -> None:
        inside = length <= end - begin
        last = begin + np.where(inside, length, 0)
        seen = np.where(last > begin, self._visible[last - 1], np.iinfo(np.int64).min)
        unseen = np.where(last < end, self._visible[last], np.iinfo(np.int64).max)
        if not np.all(inside & is_pointer_valid(seen, unseen, as_of)):
            raise UserError(
                "histories were rewritten after the examples that point into them were built; "
                "run `gemline features examples` for those days again"
            )

    @cached_property
    def _offsets(self) -> Int64:
        """Offsets of the users' events, with an empty range at the end for user -1."""
        return np.append(self.events.offsets, self.events.offsets[-1])

    @cached_property
    def _dropped(self) -> Int64:
        return np.append(self.dropped_events, 0)

    @cached_property
    def _visible(self) -> Int64:
        return np.append(self.events.visible_ts, 0)

    @cached_property
    def _selected_events(self) -> pa.FixedSizeBinaryArray:
        """The events of `event_types`, as bytes of EVENT_DTYPE."""
        stored = self.events
        rows = np.zeros(len(stored.item_indexes), EVENT_DTYPE)
        rows["visible_ts"], rows["item"] = stored.visible_ts, stored.item_indexes
        rows["surface"], rows["type"], rows["dwell"] = (
            stored.surfaces, stored.types, stored.dwells
        )  # fmt: skip
        if self.event_types:
            rows = rows[self._is_selected]
        shape = pa.binary(EVENT_DTYPE.itemsize)
        return pa.FixedSizeBinaryArray.from_buffers(shape, len(rows), [None, pa.py_buffer(rows)])

    @cached_property
    def _selected_before(self) -> Int64:
        """The number of events of `event_types` before each position."""
        return np.concatenate(([0], np.cumsum(self._is_selected)))

    @cached_property
    def _is_selected(self) -> npt.NDArray[np.bool_]:
        """Whether each event is one of `event_types`."""
        return np.isin(self.events.types, self.event_types)


def load_histories(
    snapshot: Snapshot, bucket: int, event_types: tuple[int, ...] = ()
) -> UserHistories:
    """The histories of one bucket; slices hold only events of `event_types`, or all if empty."""
    columns = ["user_id", "day", "chunk", "dropped", "first_ts", "events"]
    for name in BYTE_WIDTHS:
        if name != "lags":
            columns += plane_columns(name)
    return histories_from_table(snapshot.read(columns, bucket=bucket), event_types)


def histories_from_table(table: pa.Table, event_types: tuple[int, ...] = ()) -> UserHistories:
    """Histories from rows of the history table, in any order."""
    order = [(name, "ascending") for name in ("user_id", "day", "chunk")]
    table = table.sort_by(order).combine_chunks()
    lengths = table["events"].to_numpy().astype(np.int64)
    flat = decode_rows(table, lengths)
    rows = np.concatenate(([0], np.cumsum(lengths)))
    users, starts = _unique_with_starts(table["user_id"].combine_chunks())
    visible = delta_decode(table["first_ts"].to_numpy(), flat["gaps"], rows)
    events = UserEvents(
        offsets=np.append(rows[starts], rows[-1]),
        visible_ts=visible,
        visibility_lags=flat.get("lags"),
        item_indexes=flat["items"],
        surfaces=flat["surfaces"],
        types=flat["types"],
        dwells=flat["dwells"],
    )
    dropped = np.add.reduceat(table["dropped"].to_numpy(), starts) if len(starts) else starts
    return UserHistories(users, events, dropped.astype(np.int64), event_types)


def _unique_with_starts(sorted_ids: pa.Array) -> tuple[pa.Array, Int64]:
    """Each id once (U), and the position of its first row (U)."""
    encoded = pc.run_end_encode(sorted_ids)
    ends = encoded.run_ends.to_numpy()
    return encoded.values, np.concatenate(([0], ends[:-1])).astype(np.int64)
