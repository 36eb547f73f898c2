"""The files of `gemline bench sequence`, read as one log.

train.csv, valid.csv and test.csv have rows of user, item, time and label. Optional files are
events.csv, with history-only entries, and users.csv and items.csv, with attributes.

N entries (rows and events) of all files, user by user, oldest first.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.public.tabular_data import parse_numbers, read_csv
from etl.array_types import Float64, Int64
from etl.errors import UserError

SPLITS = ("train", "valid", "test")
EVENT_SPLIT = len(SPLITS)  # the split of history-only entries
UNLABELLED, NEGATIVE, POSITIVE = range(3)
UNKNOWN = 0
MULTI_VALUE_SEPARATOR = "|"  # between the values of a multi-valued attribute


@dataclass(frozen=True)
class Attribute:
    """Values of an attribute by entity: those of e are `values[offsets[e] : offsets[e + 1]]`.

    Each entity has at least one, UNKNOWN if none is given; `num_values` counts the distinct
    ones, UNKNOWN included.
    """

    values: Int64
    offsets: Int64
    num_values: int


@dataclass(frozen=True)
class InteractionLog:
    """Entries (N) sorted by user and time, delimited by `user_offsets` (U + 1).

    `user` and `item` are vocabulary indexes from 1, UNKNOWN if not in training; `item_code`
    distinguishes all items. `label` is one of UNLABELLED, NEGATIVE and POSITIVE, `split` an index
    of SPLITS or EVENT_SPLIT.
    """

    user: Int64
    item: Int64
    item_code: Int64
    time: Float64
    label: Int64
    split: Int64
    user_offsets: Int64
    num_users: int
    num_items: int
    user_attributes: dict[str, Attribute]
    item_attributes: dict[str, Attribute]

    def __len__(self) -> int:
        """Number of entries."""
        return len(self.time)

    @property
    def user_code(self) -> Int64:
        """The user of each entry (N), from 0; unlike `user` it distinguishes all users."""
        return np.repeat(np.arange(len(self.user_offsets) - 1), np.diff(self.user_offsets))


def read_log(folder: Path) -> InteractionLog:
    """The log of a folder's files. Raises UserError if one does not have the layout."""
    parts = [_entries(folder, f"{name}.csv", split) for split, name in enumerate(SPLITS)]
    if (folder / "events.csv").is_file():
        parts.append(_entries(folder, "events.csv", EVENT_SPLIT))
    table = pa.concat_tables(parts)
    users, items = (table[name].combine_chunks().dictionary_encode() for name in ("user", "item"))
    order = np.lexsort((table["time"].to_numpy(), users.indices.to_numpy()))
    user_code = users.indices.to_numpy()[order].astype(np.int64)
    item_code = items.indices.to_numpy()[order].astype(np.int64)
    split = table["split"].to_numpy()[order]
    is_train = split == SPLITS.index("train")
    user, num_users = vocabulary_index(user_code, user_code[is_train])
    item, num_items = vocabulary_index(item_code, item_code[is_train | (split == EVENT_SPLIT)])
    return InteractionLog(
        user=user,
        item=item,
        item_code=item_code,
        time=table["time"].to_numpy()[order],
        label=table["label"].to_numpy()[order],
        split=split,
        user_offsets=np.searchsorted(user_code, np.arange(len(users.dictionary) + 1)),
        num_users=num_users,
        num_items=num_items,
        user_attributes=_attributes(folder, "user", users.dictionary),
        item_attributes=_attributes(folder, "item", items.dictionary),
    )


def vocabulary_index(codes: Int64, training_values: Int64) -> tuple[Int64, int]:
    """Indexes from 1 of training values, UNKNOWN for others; and the size of the vocabulary."""
    vocabulary = np.unique(training_values)
    positions = np.searchsorted(vocabulary, codes).clip(max=len(vocabulary) - 1)
    indexes = np.where(vocabulary[positions] == codes, positions + 1, UNKNOWN)
    return indexes, len(vocabulary) + 1


def _entries(folder: Path, name: str, split: int) -> pa.Table:
    table = read_csv(folder, name)
    required = ["user", "item", "time"] + (["label"] if split != EVENT_SPLIT else [])
    missing = [column for column in required if column not in table.column_names]
    if missing:
        raise UserError(f"{name} has no column {', '.join(missing)}")
    return pa.table(
        {
            "user": table["user"],
            "item": table["item"],
            "time": _times(table, name),
            "label": _labels(table, name, split),
            "split": np.full(len(table), split, np.int64),
        }
    )


def _times(table: pa.Table, name: str) -> Float64:
    """Times in seconds, from numbers or from dates and times in ISO 8601."""
    time: Float64
    try:
        micros = table["time"].cast(pa.timestamp("us")).cast(pa.int64())
        time = pc.divide(micros.cast(pa.float64()), 1e6).to_numpy()
    except pa.ArrowInvalid:
        time = parse_numbers(table, "time", name, pa.float64()).astype(np.float64)
    if np.isnan(time).any():
        raise UserError(f"{name}: the time of a row is missing")
    return time


def _labels(table: pa.Table, name: str, split: int) -> Int64:
    if "label" not in table.column_names:
        return np.full(len(table), UNLABELLED, np.int64)
    labels = parse_numbers(table, "label", name, pa.float32())
    missing = np.isnan(labels) if split == EVENT_SPLIT else np.zeros(len(labels), bool)
    if not (missing | np.isin(labels, (0, 1))).all():
        raise UserError(f"{name}: the label must be 0 or 1 in every row")
    if split != EVENT_SPLIT and len(np.unique(labels)) < 2:
        raise UserError(f"{name}: there must be labels of both classes")
    return np.select([missing, labels == 0], [UNLABELLED, NEGATIVE], POSITIVE)


def _attributes(folder: Path, entity: str, names: pa.Array) -> dict[str, Attribute]:
    """The columns of users.csv or items.csv except for the id; empty if the file is missing."""
    name = f"{entity}s.csv"
    if not (folder / name).is_file():
        return {}
    table = read_csv(folder, name)
    if entity not in table.column_names:
        raise UserError(f"{name} has no column {entity}")
    if pc.count_distinct(table[entity]).as_py() < len(table):
        raise UserError(f"{name} has several rows of one {entity}")
    rows = pc.index_in(names, table[entity].combine_chunks())
    return {
        column: _attribute(table[column].combine_chunks().take(rows))
        for column in table.column_names
        if column != entity
    }


def _attribute(column: pa.Array) -> Attribute:
    values_by_entity = pc.split_pattern(pc.fill_null(column, ""), MULTI_VALUE_SEPARATOR)
    values = values_by_entity.flatten().dictionary_encode()
    codes = values.indices.to_numpy().astype(np.int64) + 1
    empty = pc.index_in(pa.scalar(""), values.dictionary).as_py()
    if empty is not None:
        codes = np.where(codes == empty + 1, UNKNOWN, codes)
    offsets = values_by_entity.offsets.to_numpy().astype(np.int64)
    return Attribute(codes, offsets, len(values.dictionary) + 1)
