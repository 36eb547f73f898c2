"""Rows of CSV files as ids and numbers, encoded with the vocabulary of the training file.

B rows, F categorical fields, M numbers.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pc_csv
import torch
from torch import Tensor

from etl.array_types import Float32, Floats, Int64
from etl.errors import UserError

Batch = tuple[tuple[Tensor, Tensor], Tensor]
MAX_BATCH_ROWS = 4096  # as in BARS (2205.09626)
MIN_BATCH_ROWS = 64
STEPS_PER_EPOCH = 32  # if batches then have MIN_BATCH_ROWS rows or more
UNKNOWN = 0  # the id of missing values, and of values not in training


@dataclass(frozen=True)
class TabularRows:
    """`ids` (B, F), `numeric` (B, M) with NaN where missing, `labels` (B)."""

    ids: Int64
    numeric: Float32
    labels: Float32
    batch_rows: int = MAX_BATCH_ROWS

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.labels)

    def with_numbers(self, numbers: Float32) -> "TabularRows":
        """The same rows with further numbers (B, k)."""
        return replace(self, numeric=np.concatenate((self.numeric, numbers), 1))

    def shuffled(self, generator: torch.Generator) -> Iterator[Batch]:
        """Batches of all rows in random order."""
        return self._batches(torch.randperm(len(self), generator=generator))

    def in_order(self) -> Iterator[Batch]:
        """Batches in the order of the file."""
        return self._batches(torch.arange(len(self)))

    def _batches(self, order: Tensor) -> Iterator[Batch]:
        ids, numeric, labels = map(torch.from_numpy, (self.ids, self.numeric, self.labels))
        for rows in torch.split(order, self.batch_rows):
            yield (ids[rows], numeric[rows]), labels[rows]


@dataclass(frozen=True)
class FieldEncoding:
    """The encoding of a table: the values of each field in the order of their ids, from 1."""

    label: str
    fields: dict[str, pa.Array]
    numeric: tuple[str, ...]

    @classmethod
    def from_train(cls, train: pa.Table, label: str, numeric: Collection[str]) -> "FieldEncoding":
        """The encoding of a training file; columns that are neither label nor numeric are fields.

        Raises UserError if a named column is absent.
        """
        missing = [name for name in (label, *numeric) if name not in train.column_names]
        if missing:
            raise UserError(
                f"train.csv has no column {', '.join(missing)}; it has "
                f"{', '.join(train.column_names)}"
            )
        names = [n for n in train.column_names if n != label and n not in numeric]
        fields = {name: pc.unique(train[name].drop_null()) for name in names}
        return cls(label, fields, tuple(n for n in train.column_names if n in numeric))

    @property
    def vocabulary_sizes(self) -> list[int]:
        """The number of ids of each field, with the unknown one."""
        return [len(values) + 1 for values in self.fields.values()]

    def __call__(self, table: pa.Table, name: str) -> TabularRows:
        """Encode the rows of the file `name`. Raises UserError if its columns do not fit."""
        columns = (self.label, *self.fields, *self.numeric)
        missing = [column for column in columns if column not in table.column_names]
        if missing:
            raise UserError(f"{name} has no column {', '.join(missing)}, which train.csv has")
        ids = [
            pc.fill_null(pc.index_in(table[field], values), -1).to_numpy() + 1
            for field, values in self.fields.items()
        ]
        numeric = [parse_numbers(table, column, name, pa.float32()) for column in self.numeric]
        labels = parse_numbers(table, self.label, name, pa.float32())
        if not np.isin(labels, (0, 1)).all():
            raise UserError(f"{name}: the label {self.label} must be 0 or 1 in every row")
        empty = np.empty((len(table), 0))
        batch_rows = max(MIN_BATCH_ROWS, min(MAX_BATCH_ROWS, len(table) // STEPS_PER_EPOCH))
        return TabularRows(
            ids=np.stack(ids, 1).astype(np.int64) if ids else empty.astype(np.int64),
            numeric=np.stack(numeric, 1) if numeric else empty.astype(np.float32),
            labels=labels,
            batch_rows=batch_rows,
        )


def parse_numbers(table: pa.Table, column: str, name: str, kind: pa.DataType) -> Floats:
    """A text column of the file `name` as numbers, NaN if empty.

    Raises UserError if a value is not a number.
    """
    text = pc.if_else(pc.equal(table[column], ""), None, table[column])
    try:
        numbers: Floats = text.cast(kind).to_numpy().copy()
    except pa.ArrowInvalid as error:
        raise UserError(f"{name}: column {column} has a non-numeric value: {error}") from None
    return numbers


def read_csv(folder: Path, name: str) -> pa.Table:
    """A CSV file with a header, every column as text.

    Raises UserError if the file is absent or has no rows.
    """
    path = folder / name
    if not path.is_file():
        raise UserError(f"{path} is absent; the folder needs train.csv, valid.csv and test.csv")
    header = pc_csv.open_csv(path).schema.names
    as_text = pc_csv.ConvertOptions(column_types=dict.fromkeys(header, pa.string()))
    table = pc_csv.read_csv(path, convert_options=as_text)
    if not len(table):
        raise UserError(f"{path} has a header but no rows")
    return table
