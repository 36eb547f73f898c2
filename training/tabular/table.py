"""Rows of CSV files as ids and numbers, by what the training file holds.

B rows, F categorical fields, M numbers.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pc_csv
import torch
from torch import Tensor

from etl.errors import UserError

Batch = tuple[tuple[Tensor, Tensor], Tensor]
MOST, LEAST = 4096, 64  # rows of a batch; BARS (2205.09626) has 4096 for large files
STEPS = 32  # of an epoch, where the file is large enough for batches of the least rows
UNKNOWN = 0  # the id of a value that the training file lacks, and of a missing one


@dataclass(frozen=True)
class Rows:
    """`ids` (B, F), `numbers` (B, M) with NaN where missing, `labels` (B)."""

    ids: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.float32]
    labels: npt.NDArray[np.float32]
    batch_rows: int = MOST

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.labels)

    def shuffled(self, generator: torch.Generator) -> Iterator[Batch]:
        """Batches of all rows in random order."""
        return self._batches(torch.randperm(len(self), generator=generator))

    def in_order(self) -> Iterator[Batch]:
        """Batches as they stand in the file."""
        return self._batches(torch.arange(len(self)))

    def _batches(self, order: Tensor) -> Iterator[Batch]:
        ids, numbers, labels = map(torch.from_numpy, (self.ids, self.numbers, self.labels))
        for at in order.split(self.batch_rows):
            yield (ids[at], numbers[at]), labels[at]


@dataclass(frozen=True)
class Encoding:
    """How a table is read: the values of each field in the order of their ids, from 1."""

    label: str
    fields: dict[str, pa.Array]
    numeric: tuple[str, ...]

    @classmethod
    def of(cls, train: pa.Table, label: str, numeric: Collection[str]) -> "Encoding":
        """All columns but the label and the numeric ones are categorical, whatever they hold."""
        lacking = [name for name in (label, *numeric) if name not in train.column_names]
        if lacking:
            raise UserError(
                f"train.csv has no column {', '.join(lacking)}; it has "
                f"{', '.join(train.column_names)}"
            )
        names = [n for n in train.column_names if n != label and n not in numeric]
        fields = {name: pc.unique(train[name].drop_null()) for name in names}
        return cls(label, fields, tuple(n for n in train.column_names if n in numeric))

    @property
    def sizes(self) -> list[int]:
        """Ids of each field, the unknown one included."""
        return [len(values) + 1 for values in self.fields.values()]

    def __call__(self, table: pa.Table, name: str) -> Rows:
        """A table's rows; `name` is its file's. Raises UserError where columns are not as told."""
        lacking = [
            n for n in (self.label, *self.fields, *self.numeric) if n not in table.column_names
        ]
        if lacking:
            raise UserError(f"{name} has no column {', '.join(lacking)}, which train.csv has")
        ids = [
            pc.fill_null(pc.index_in(table[field], values), -1).to_numpy() + 1
            for field, values in self.fields.items()
        ]
        numbers = [numbers_of(table, column, name, pa.float32()) for column in self.numeric]
        labels = numbers_of(table, self.label, name, pa.float32())
        if not np.isin(labels, (0, 1)).all():
            raise UserError(f"{name}: the label {self.label} must be 0 or 1 in every row")
        empty = np.empty((len(table), 0))
        return Rows(
            np.stack(ids, 1).astype(np.int64) if ids else empty.astype(np.int64),
            np.stack(numbers, 1) if numbers else empty.astype(np.float32),
            labels,
            max(LEAST, min(MOST, len(table) // STEPS)),
        )


def numbers_of(
    table: pa.Table, column: str, name: str, kind: pa.DataType
) -> npt.NDArray[np.floating]:
    """A column of text as numbers, NaN where empty. Raises UserError where one is none."""
    text = pc.if_else(pc.equal(table[column], ""), None, table[column])
    try:
        return text.cast(kind).to_numpy().copy()
    except pa.ArrowInvalid as error:
        raise UserError(f"{name}: column {column} holds what is not a number: {error}") from None


def read_csv(folder: Path, name: str) -> pa.Table:
    """A CSV file with a header, every column as text. Raises UserError where there is none."""
    path = folder / name
    if not path.is_file():
        raise UserError(f"{path} is absent; the folder needs train.csv, valid.csv and test.csv")
    header = pc_csv.open_csv(path).schema.names
    kept = pc_csv.ConvertOptions(column_types=dict.fromkeys(header, pa.string()))
    table = pc_csv.read_csv(path, convert_options=kept)
    if not len(table):
        raise UserError(f"{path} has a header and no rows")
    return table
