"""The items table in memory: attributes by item index, for candidates and for events alike."""

from dataclasses import dataclass
from datetime import date

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from etl.tables.arrow import Snapshot
from training.data.features import Group

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ItemTable:
    """Arrays with a row an item index; row 0 is no item."""

    ids: dict[str, Int64]
    numbers: npt.NDArray[np.float32]
    vectors: dict[str, npt.NDArray[np.float32]]
    names: npt.NDArray[np.object_]
    first_seen: npt.NDArray[np.datetime64]

    def known_by(self, day: date) -> npt.NDArray[np.bool_]:
        """Whether each item (I) was first seen by the end of a day."""
        return self.first_seen <= np.datetime64(day)

    def __len__(self) -> int:
        """Rows, that of no item included."""
        return len(self.names)


def load_items(snapshot: Snapshot, group: Group) -> ItemTable:
    """The items of a version; what is missing is row 0, NaN or a zero vector."""
    columns = ["item_id", "item_ix", "day", *group.ids, *group.numbers, *group.vectors]
    table = snapshot.read(columns).combine_chunks()
    where = table["item_ix"].to_numpy()
    rows = int(where.max(initial=0)) + 1

    def placed(values: npt.NDArray[np.generic], empty: npt.NDArray[np.generic]) -> npt.NDArray:
        empty[where] = values
        return empty

    numbers = [table[name].to_numpy().astype(np.float32) for name in group.numbers]
    return ItemTable(
        ids={
            name: placed(table[name].fill_null(0).to_numpy(), np.zeros(rows, np.int64))
            for name in group.ids
        },
        numbers=placed(
            np.stack(numbers, 1) if numbers else np.zeros((len(where), 0), np.float32),
            np.full((rows, len(numbers)), np.nan, np.float32),
        ),
        vectors={
            name: placed(_matrix(table[name], width), np.zeros((rows, width), np.float32))
            for name, width in group.vectors.items()
        },
        names=placed(np.asarray(table["item_id"]), np.full(rows, None, object)),
        first_seen=placed(table["day"].to_numpy(), np.full(rows, "NaT", "datetime64[D]")),
    )


def _matrix(column: pa.ChunkedArray, width: int) -> npt.NDArray[np.float32]:
    """Lists of `width` numbers as rows; null lists are zeros."""
    lists = column.combine_chunks()
    rows = np.zeros((len(lists), width), np.float32)
    rows[lists.is_valid().to_numpy(zero_copy_only=False)] = (
        lists.drop_null().flatten().to_numpy(zero_copy_only=False).reshape(-1, width)
    )
    return rows
