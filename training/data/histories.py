"""Histories of a bucket in memory, and the pointer join: slices for many requests at once."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from etl.array_types import Bools, Int64
from etl.errors import UserError
from etl.tables.arrow import Snapshot
from features.history.codec import (
    BYTE_WIDTHS,
    UserEvents,
    attribute_columns,
    decode_rows,
    delta_decode,
    plane_columns,
)
from features.ragged import is_pointer_valid

SMALLEST_INT64, LARGEST_INT64 = np.iinfo(np.int64).min, np.iinfo(np.int64).max
EVENT_FIELDS = [("visible_ts", "<i8"), ("item", "<i4"), ("surface", "i1"), ("type", "i1"),
                ("dwell", "i1"), ("unused", "i1")]  # fmt: skip


@dataclass(frozen=True)
class HistorySlices:
    """Ragged `events`, oldest first, cut by `offsets` (R+1).

    Their fields are EVENT_FIELDS and the attributes of events, by column.
    """

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

    @property
    def num_bytes(self) -> int:
        """The memory that the histories take once slices were read."""
        stored = self.events
        of_event = 8 + 4 + 3 + len(stored.attributes) + self._event_dtype.itemsize
        of_event += 8 if self.event_types else 0
        return len(stored.item_indexes) * of_event + int(self.users.nbytes) + stored.offsets.nbytes

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
        dtype = self._event_dtype
        events = np.ndarray(len(runs), dtype, data, runs.offset * dtype.itemsize)
        return HistorySlices(events, np.concatenate(([0], np.cumsum(last - start))))

    def _check_pointers(self, begin: Int64, end: Int64, as_of: Int64, length: Int64) -> None:
        inside = length <= end - begin
        last = begin + np.where(inside, length, 0)
        visible = self.events.visible_ts
        seen, unseen = np.full(len(last), SMALLEST_INT64), np.full(len(last), LARGEST_INT64)
        has_seen, has_unseen = last > begin, last < end
        seen[has_seen] = visible[last[has_seen] - 1]
        unseen[has_unseen] = visible[last[has_unseen]]
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
    def _event_dtype(self) -> np.dtype[np.void]:
        """What a model reads of an event, as one struct: slicing a history is then one copy."""
        return np.dtype([*EVENT_FIELDS, *((name, "u1") for name in self.events.attributes)])

    @cached_property
    def _selected_events(self) -> pa.FixedSizeBinaryArray:
        """The events of `event_types`, as bytes of structs."""
        stored = self.events
        rows = np.zeros(len(stored.item_indexes), self._event_dtype)
        rows["visible_ts"], rows["item"] = stored.visible_ts, stored.item_indexes
        rows["surface"], rows["type"], rows["dwell"] = (
            stored.surfaces, stored.types, stored.dwells
        )  # fmt: skip
        for name, codes in stored.attributes.items():
            rows[name] = codes
        if self.event_types:
            rows = rows[self._is_selected]
        shape = pa.binary(self._event_dtype.itemsize)
        return pa.FixedSizeBinaryArray.from_buffers(shape, len(rows), [None, pa.py_buffer(rows)])

    @cached_property
    def _selected_before(self) -> Int64:
        """The number of events of `event_types` before each position."""
        return np.concatenate(([0], np.cumsum(self._is_selected)))

    @cached_property
    def _is_selected(self) -> Bools:
        """Whether each event is one of `event_types`."""
        return np.isin(self.events.types, self.event_types)


@dataclass(frozen=True)
class NeededEvents:
    """Which events some requests read: of each user (U), those from `first` (U) to `last` (U).

    Both are positions in the user's history, which count removed events, too. The event at `last`
    comes after those that are read; pointers are checked with it.
    """

    users: pa.Array
    first: Int64
    last: Int64

    @classmethod
    def of_requests(cls, users: pa.Array, length: Int64, max_events: int | None) -> "NeededEvents":
        """The events before the pointers (R) of users (R), at most `max_events`; None is all."""
        requests = pa.table({"user": users, "length": length})
        by_user = requests.group_by("user").aggregate([("length", "min"), ("length", "max")])
        by_user = by_user.sort_by("user")  # equal requests need equal events
        shortest, longest = (by_user[f"length_{name}"].to_numpy() for name in ("min", "max"))
        first = np.zeros_like(shortest) if max_events is None else shortest - max_events
        return cls(by_user["user"].combine_chunks(), first, longest)

    def equals(self, other: "NeededEvents") -> bool:
        """Whether both are of the same users and events."""
        return (
            self.users.equals(other.users)
            and np.array_equal(self.first, other.first)
            and np.array_equal(self.last, other.last)
        )


@dataclass
class HistoryCache:
    """Loads the histories that partitions of examples need; the latest stay in memory.

    The histories of one bucket are in memory in any case, those of others as long as all together
    take at most `max_bytes`.
    """

    snapshot: Snapshot
    event_types: tuple[int, ...]
    max_bytes: int
    _cached: dict[int, tuple[NeededEvents, UserHistories]] = field(default_factory=dict)

    def load(self, bucket: int, needed: NeededEvents) -> UserHistories:
        """The needed histories of a bucket."""
        cached = self._cached.pop(bucket, None)
        if cached is None or not cached[0].equals(needed):
            cached = needed, load_histories(self.snapshot, bucket, self.event_types, needed)
        self._cached[bucket] = cached  # the latest is the last
        num_bytes = sum(histories.num_bytes for _, histories in self._cached.values())
        for oldest in list(self._cached)[:-1]:
            if num_bytes <= self.max_bytes:
                break
            num_bytes -= self._cached.pop(oldest)[1].num_bytes
        return cached[1]


def load_histories(
    snapshot: Snapshot,
    bucket: int,
    event_types: tuple[int, ...] = (),
    needed: NeededEvents | None = None,
) -> UserHistories:
    """The histories of one bucket; slices hold only events of `event_types`, or all if empty.

    With `needed`, histories of other users are left out, and of these users rows that hold no
    needed event.
    """
    columns = ["user_id", "day", "chunk", "dropped", "first_ts", "events"]
    for name in BYTE_WIDTHS:
        if name != "lags":
            columns += plane_columns(name)
    columns += attribute_columns(snapshot.schema.columns)
    if needed is None:
        return histories_from_table(snapshot.read(columns, bucket=bucket), event_types)
    table = snapshot.read_matching("user_id", needed.users, columns, bucket=bucket)
    return histories_from_table(table, event_types, needed)


def histories_from_table(
    table: pa.Table, event_types: tuple[int, ...] = (), needed: NeededEvents | None = None
) -> UserHistories:
    """Histories from rows of the history table, in any order."""
    order = [(name, "ascending") for name in ("user_id", "day", "chunk")]
    table = table.sort_by(order).combine_chunks()
    if needed is not None:
        table = _needed_rows(table, needed)
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
        attributes={name: flat[name].view(np.uint8) for name in attribute_columns(flat)},
    )
    dropped = np.add.reduceat(table["dropped"].to_numpy(), starts) if len(starts) else starts
    return UserHistories(users, events, dropped.astype(np.int64), event_types)


def _needed_rows(table: pa.Table, needed: NeededEvents) -> pa.Table:
    """The sorted rows that hold needed events; `dropped` counts the events before them, too."""
    if not len(table):
        return table
    users, starts = _unique_with_starts(table["user_id"].combine_chunks())
    num_rows = np.diff(np.append(starts, len(table)))
    lengths = table["events"].to_numpy().astype(np.int64)
    dropped = np.add.reduceat(table["dropped"].to_numpy().astype(np.int64), starts)
    before = np.cumsum(lengths) - lengths
    begin = before - np.repeat(before[starts] - dropped, num_rows)  # of each row, in the history
    user = pc.index_in(users, needed.users).to_numpy()
    first = np.repeat(needed.first[user], num_rows)
    # Where compaction removed all that requests read, the user's first row is kept, which shows it.
    last = np.repeat(np.maximum(needed.last[user], dropped), num_rows)
    is_needed = (begin + lengths > first) & (begin <= last)
    # The first row of a user that is kept stands for all events before it.
    user_of_row = np.where(is_needed, np.repeat(user, num_rows), -1)
    is_first = is_needed & (np.diff(user_of_row, prepend=-1) != 0)
    column = pa.array(np.where(is_first, begin, 0).astype(np.int32))
    table = table.set_column(table.column_names.index("dropped"), "dropped", column)
    return table.filter(pa.array(is_needed)).combine_chunks()


def _unique_with_starts(sorted_ids: pa.Array) -> tuple[pa.Array, Int64]:
    """Each id once (U), and the position of its first row (U)."""
    encoded = pc.run_end_encode(sorted_ids)
    ends = encoded.run_ends.to_numpy().astype(np.int64)
    return encoded.values, np.concatenate(([0], ends))[: len(ends)]
