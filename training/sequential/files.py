"""The layout: train.csv, valid.csv and test.csv of user, item, time and label, and what may lie by.

N entries (rows and events) of all files in one log, user by user, oldest first.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from etl.errors import UserError
from training.tabular.table import numbers_of, read_csv

SPLITS = ("train", "valid", "test")
EVENT = len(SPLITS)  # the split of an entry that is no row: it is only looked back at
UNLABELLED, NEGATIVE, POSITIVE = range(3)
UNKNOWN = 0
SEVERAL = "|"  # parts the values of an attribute that can have several

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Attribute:
    """Values of an attribute by entity: those of e are `values[offsets[e] : offsets[e + 1]]`.

    Each has at least one, UNKNOWN where none is told; `size` counts the different ones, that
    included.
    """

    values: Int64
    offsets: Int64
    size: int


@dataclass(frozen=True)
class Log:
    """Entries (N) sorted by user and time, `user_offsets` (U + 1) cut them into users.

    `user` and `item` are indexes from 1, UNKNOWN for those that training lacks; `key` tells items
    apart that are. `label` is one of UNLABELLED, NEGATIVE and POSITIVE, `split` an index of SPLITS
    or EVENT.
    """

    user: Int64
    item: Int64
    key: Int64
    time: npt.NDArray[np.float64]
    label: Int64
    split: Int64
    user_offsets: Int64
    users: int
    items: int
    user_attributes: dict[str, Attribute]
    item_attributes: dict[str, Attribute]

    def __len__(self) -> int:
        """Number of entries."""
        return len(self.time)

    @property
    def person(self) -> Int64:
        """Whose each entry (N) is; users that training lacks are told apart too."""
        return np.repeat(np.arange(len(self.user_offsets) - 1), np.diff(self.user_offsets))


def read_log(folder: Path) -> Log:
    """All files of a folder. Raises UserError where one is not as the layout says."""
    parts = [_entries(folder, f"{name}.csv", split) for split, name in enumerate(SPLITS)]
    if (folder / "events.csv").is_file():
        parts.append(_entries(folder, "events.csv", EVENT))
    table = pa.concat_tables(parts)
    user, item = (table[name].combine_chunks().dictionary_encode() for name in ("user", "item"))
    order = np.lexsort((table["time"].to_numpy(), user.indices.to_numpy()))
    person = user.indices.to_numpy()[order].astype(np.int64)
    key = item.indices.to_numpy()[order].astype(np.int64)
    split = table["split"].to_numpy()[order]
    learned = split == SPLITS.index("train")
    return Log(
        user=known(person, person[learned])[0],
        item=known(key, key[learned | (split == EVENT)])[0],
        key=key,
        time=table["time"].to_numpy()[order],
        label=table["label"].to_numpy()[order],
        split=split,
        user_offsets=np.searchsorted(person, np.arange(len(user.dictionary) + 1)),
        users=known(person, person[learned])[1],
        items=known(key, key[learned | (split == EVENT)])[1],
        user_attributes=_attributes(folder, "user", user.dictionary),
        item_attributes=_attributes(folder, "item", item.dictionary),
    )


def known(of: Int64, learned: Int64) -> tuple[Int64, int]:
    """Indexes from 1 of the values that are learned of, UNKNOWN for others; and how many in all."""
    values = np.unique(learned)
    at = np.searchsorted(values, of).clip(max=len(values) - 1)
    return np.where(values[at] == of, at + 1, UNKNOWN), len(values) + 1


def _entries(folder: Path, name: str, split: int) -> pa.Table:
    table = read_csv(folder, name)
    wanted = ["user", "item", "time"] + (["label"] if split != EVENT else [])
    lacking = [column for column in wanted if column not in table.column_names]
    if lacking:
        raise UserError(f"{name} has no column {', '.join(lacking)}")
    return pa.table(
        {
            "user": table["user"],
            "item": table["item"],
            "time": _times(table, name),
            "label": _labels(table, name, split),
            "split": np.full(len(table), split, np.int64),
        }
    )


def _times(table: pa.Table, name: str) -> npt.NDArray[np.float64]:
    """Seconds: numbers as they are, or dates and times in ISO 8601."""
    try:
        written = table["time"].cast(pa.timestamp("us")).cast(pa.int64())
        time = pc.divide(written.cast(pa.float64()), 1e6).to_numpy()
    except pa.ArrowInvalid:
        time = numbers_of(table, "time", name, pa.float64()).astype(np.float64)
    if np.isnan(time).any():
        raise UserError(f"{name}: the time of a row is missing")
    return time


def _labels(table: pa.Table, name: str, split: int) -> Int64:
    if "label" not in table.column_names:
        return np.full(len(table), UNLABELLED, np.int64)
    told = numbers_of(table, "label", name, pa.float32())
    missing = np.isnan(told) if split == EVENT else np.zeros(len(told), bool)
    if not (missing | np.isin(told, (0, 1))).all():
        raise UserError(f"{name}: the label must be 0 or 1 in every row")
    if split != EVENT and len(np.unique(told)) < 2:
        raise UserError(f"{name}: there must be labels of both classes")
    return np.select([missing, told == 0], [UNLABELLED, NEGATIVE], POSITIVE)


def _attributes(folder: Path, entity: str, names: pa.Array) -> dict[str, Attribute]:
    """Each column of users.csv or items.csv but the entity's own; empty where there is no file."""
    name = f"{entity}s.csv"
    if not (folder / name).is_file():
        return {}
    table = read_csv(folder, name)
    if entity not in table.column_names:
        raise UserError(f"{name} has no column {entity}")
    if pc.count_distinct(table[entity]).as_py() < len(table):
        raise UserError(f"{name} has several rows of one {entity}")
    at = pc.index_in(names, table[entity].combine_chunks())
    return {
        column: _attribute(table[column].combine_chunks().take(at))
        for column in table.column_names
        if column != entity
    }


def _attribute(told: pa.Array) -> Attribute:
    several = pc.split_pattern(pc.fill_null(told, ""), SEVERAL)
    values = several.flatten().dictionary_encode()
    codes = values.indices.to_numpy().astype(np.int64) + 1
    empty = pc.index_in(pa.scalar(""), values.dictionary).as_py()
    codes = np.where(codes == (-1 if empty is None else empty + 1), UNKNOWN, codes)
    return Attribute(codes, several.offsets.to_numpy().astype(np.int64), len(values.dictionary) + 1)
