"""The items in memory: their names by index, and what was known of them as of any second."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from etl.spec.units import MICROS
from etl.tables.arrow import Snapshot
from etl.tables.contracts import RESERVED_ITEMS
from features.inputs import Group

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
NEVER = (1 << 33) - 1  # a second of the year 2242


@dataclass(frozen=True)
class ItemTable:
    """I items by index, and V versions of their attributes; version 0 is nothing known.

    Versions of an item lie together, `versions` (I) of them from `first` (I) on, each known from
    the second `since` (V); `ids`, `numbers` and `vectors` have a row a version. `keys` (V) hold
    item and second in one number, ascending.
    """

    names: npt.NDArray[np.object_]
    first_seen: npt.NDArray[np.datetime64]
    first: Int64
    versions: Int64
    since: Int64
    keys: Int64
    ids: dict[str, Int64]
    numbers: Float32
    vectors: dict[str, Float32]

    def known_by(self, day: date) -> npt.NDArray[np.bool_]:
        """Whether each item (I) was first seen by the end of a day."""
        return self.first_seen <= np.datetime64(day)

    def new_on(self, day: date) -> Int64:
        """Items (n) first seen on a day."""
        return np.flatnonzero(self.first_seen == np.datetime64(day))

    def versions_at(self, items: Int64, as_of: Int64) -> Int64:
        """The newest version of each item (n) known strictly before a second, 0 where none was."""
        first = self.first[items]
        found = np.where(self.since[first] < as_of, first, 0)
        several = np.flatnonzero((self.versions[items] > 1) & (found > 0))
        asked = _key(items[several], as_of[several])
        found[several] = np.searchsorted(self.keys, asked, side="left") - 1
        return found

    def __len__(self) -> int:
        """Indexes, those reserved included."""
        return len(self.names)


def load_items(index: Snapshot, versions: Snapshot, group: Group) -> ItemTable:
    """The items of a version; what is missing is row 0, NaN or a zero vector."""
    items = index.read(["item_id", "item_ix", "day"]).combine_chunks()
    where = items["item_ix"].to_numpy()
    size = int(where.max(initial=RESERVED_ITEMS - 1)) + 1
    names, first_seen = np.full(size, None, object), np.full(size, "NaT", "datetime64[D]")
    names[where], first_seen[where] = np.asarray(items["item_id"]), items["day"].to_numpy()

    order = [(name, "ascending") for name in ("item_ix", "valid_from", "day")]
    columns = ["item_ix", "valid_from", "day", *group.ids, *group.numbers, *group.vectors]
    table = versions.read(columns).sort_by(order).combine_chunks()
    arrays = [table[name].fill_null(0).to_numpy().astype(np.int64) for name in group.ids]
    matrices = [matrix(table[name], width) for name, width in group.vectors.items()]
    numbers = [table[name].to_numpy().astype(np.float32) for name in group.numbers]
    item = table["item_ix"].to_numpy().astype(np.int64)
    kept = _changes(item, [*arrays, *numbers, *(column for m in matrices for column in m.T)])
    item, since = item[kept], table["valid_from"].to_numpy()[kept] // MICROS["s"]
    since = np.concatenate(([NEVER], since.clip(0, NEVER)))
    counts = np.bincount(item, minlength=size)
    return ItemTable(
        names=names,
        first_seen=first_seen,
        first=np.where(counts > 0, 1 + np.cumsum(counts) - counts, 0),
        versions=counts,
        since=since,
        keys=np.concatenate(([-1], _key(item, since[1:]))),
        ids={n: np.append(0, v[kept]) for n, v in zip(group.ids, arrays, strict=True)},
        numbers=np.stack([np.append(np.float32(np.nan), v[kept]) for v in numbers], 1)
        if numbers
        else np.zeros((len(since), 0), np.float32),
        vectors={
            n: np.concatenate((np.zeros((1, m.shape[1]), np.float32), m[kept]))
            for n, m in zip(group.vectors, matrices, strict=True)
        },
    )


def _key(items: Int64, seconds: Int64) -> Int64:
    return (items << 33) + np.minimum(seconds, NEVER)


def _changes(item: Int64, columns: Iterable[npt.NDArray[np.generic]]) -> npt.NDArray[np.bool_]:
    """Which versions (V) differ from the one of the same item before them."""
    same = item[1:] == item[:-1]
    for values in columns:
        equal = values[1:] == values[:-1]
        if values.dtype.kind == "f":
            equal |= np.isnan(values[1:]) & np.isnan(values[:-1])
        same = same & equal
    return np.append(np.ones(min(1, len(item)), bool), ~same)


def matrix(column: pa.ChunkedArray, width: int) -> Float32:
    """Lists of `width` numbers as rows; null lists and what is not finite are zeros."""
    lists = column.combine_chunks()
    rows = np.zeros((len(lists), width), np.float32)
    rows[lists.is_valid().to_numpy(zero_copy_only=False)] = (
        lists.drop_null().flatten().to_numpy(zero_copy_only=False).reshape(-1, width)
    )
    return np.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0)
