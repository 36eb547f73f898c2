"""All items in memory: their ids by index, and their attributes as of any second."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from etl.array_types import Bools, Float32, Int64
from etl.spec.units import MICROS
from etl.tables.arrow import Snapshot
from etl.tables.schemas import RESERVED_ITEM_INDICES
from features.encoding.vectors import vector_matrix
from features.schema import FeatureGroup

NEVER = (1 << 33) - 1  # a second of the year 2242


@dataclass(frozen=True)
class ItemTable:
    """I items by index, and V versions of their attributes; version 0 is an unknown item.

    The versions of an item are consecutive: `version_counts` (I) of them from `first_version` (I)
    on, each valid from the second `valid_from` (V). `categorical`, `numeric` and `vectors` have one
    row per version. `sort_keys` (V) combine item and second in one number, ascending.
    """

    item_ids: pa.Array
    first_seen: npt.NDArray[np.datetime64]
    first_version: Int64
    version_counts: Int64
    valid_from: Int64
    sort_keys: Int64
    categorical: dict[str, Int64]
    numeric: Float32
    vectors: dict[str, Float32]

    def seen_by(self, day: date) -> Bools:
        """Whether each item (I) was first seen by the end of a day."""
        return self.first_seen <= np.datetime64(day)

    def num_seen_by(self, day: date) -> int:
        """One more than the largest index of an item first seen by the end of a day."""
        return 1 + int(np.flatnonzero(self.seen_by(day)).max(initial=0))

    def first_seen_on(self, day: date) -> Int64:
        """Items (n) first seen on a day."""
        return np.flatnonzero(self.first_seen == np.datetime64(day))

    def versions_at(self, items: Int64, as_of: Int64) -> Int64:
        """The latest version of each item (n) known strictly before a second (n), else 0."""
        first = self.first_version[items]
        version = np.where(self.valid_from[first] < as_of, first, 0)
        several = np.flatnonzero((self.version_counts[items] > 1) & (version > 0))
        keys = _sort_key(items[several], as_of[several])
        version[several] = np.searchsorted(self.sort_keys, keys, side="left") - 1
        return version

    def __len__(self) -> int:
        """Number of item indexes, including reserved ones."""
        return len(self.item_ids)


def load_items(index: Snapshot, versions: Snapshot, item_features: FeatureGroup) -> ItemTable:
    """The items of two tables; missing attributes are row 0, NaN or a zero vector."""
    items = index.read(["item_id", "item_index", "day"]).combine_chunks()
    item_index = items["item_index"].to_numpy()
    size = int(item_index.max(initial=RESERVED_ITEM_INDICES - 1)) + 1
    row, first_seen = np.full(size, -1), np.full(size, "NaT", "datetime64[D]")
    row[item_index] = np.arange(len(items))
    first_seen[item_index] = items["day"].to_numpy()

    columns = ["item_index", "valid_from", "day", *item_features.categorical]
    columns += [*item_features.numeric, *item_features.vectors]
    order = [(name, "ascending") for name in ("item_index", "valid_from", "day")]
    table = versions.read(columns).sort_by(order).combine_chunks()
    item = table["item_index"].to_numpy().astype(np.int64)
    categorical = {
        name: table[name].fill_null(0).to_numpy().astype(np.int64)
        for name in item_features.categorical
    }
    numeric = [table[name].to_numpy().astype(np.float32) for name in item_features.numeric]
    vectors = {
        name: vector_matrix(table[name].combine_chunks(), width)
        for name, width in item_features.vectors.items()
    }
    vector_columns = [column for matrix in vectors.values() for column in matrix.T]
    changed = _is_changed(item, [*categorical.values(), *numeric, *vector_columns])
    item, valid_from = item[changed], table["valid_from"].to_numpy()[changed] // MICROS["s"]
    valid_from = np.concatenate(([NEVER], valid_from.clip(0, NEVER)))
    counts = np.bincount(item, minlength=size)
    # Version 0, the unknown item, comes before all others in each array.
    return ItemTable(
        item_ids=items["item_id"].combine_chunks().take(pa.array(row, mask=row < 0)),
        first_seen=first_seen,
        first_version=np.where(counts > 0, 1 + np.cumsum(counts) - counts, 0),
        version_counts=counts,
        valid_from=valid_from,
        sort_keys=np.concatenate(([-1], _sort_key(item, valid_from[1:]))),
        categorical={name: np.append(0, ids[changed]) for name, ids in categorical.items()},
        numeric=_numeric_matrix([values[changed] for values in numeric], len(valid_from)),
        vectors={
            name: np.concatenate((np.zeros((1, matrix.shape[1]), np.float32), matrix[changed]))
            for name, matrix in vectors.items()
        },
    )


def _numeric_matrix(columns: Sequence[Float32], rows: int) -> Float32:
    """Stacked columns (V, F), after a row of NaN."""
    if not columns:
        return np.zeros((rows, 0), np.float32)
    return np.stack([np.append(np.float32(np.nan), column) for column in columns], 1)


def _sort_key(items: Int64, seconds: Int64) -> Int64:
    return (items << 33) + np.minimum(seconds, NEVER)


def _is_changed(item: Int64, columns: Iterable[npt.NDArray[np.generic]]) -> Bools:
    """Which versions (V) differ from the previous one of the same item."""
    same = item[1:] == item[:-1]
    for values in columns:
        equal = values[1:] == values[:-1]
        if values.dtype.kind == "f":
            equal |= np.isnan(values[1:]) & np.isnan(values[:-1])
        same = same & equal
    return np.append(np.ones(min(1, len(item)), bool), ~same)
