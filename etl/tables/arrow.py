"""Tables as Arrow, without a JVM: read partitions at a version, replace whole partitions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from datetime import date
from pathlib import Path
from typing import cast
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, write_deltalake

from etl.errors import UserError
from etl.tables.contract import Contract
from etl.tables.create import create
from etl.tables.lake import Lake, provenance
from etl.tables.place import Place, place
from etl.tables.schema import arrow_schema


@dataclass(frozen=True)
class Snapshot:
    """One version of a table."""

    contract: Contract
    version: int
    files: tuple[tuple[str, dict[str, object]], ...]
    table: DeltaTable

    def days(self) -> list[date]:
        """Days that have rows."""
        return sorted({cast(date, values["day"]) for _, values in self.files})

    def only(self, path: str) -> "Snapshot":
        """The same version, one file of it."""
        return replace_fields(self, files=tuple(file for file in self.files if file[0] == path))

    def read(self, columns: Sequence[str] | None = None, **partition: object) -> pa.Table:
        """Rows of the partitions that match, each value one or a collection of values.

        `read(day=d, bucket=3)`; the columns of the contract, in its order, without `columns`.
        """
        names = list(columns or self.contract.columns)
        schema = arrow_schema(self.contract)
        wanted = {key: _choices(value) for key, value in partition.items()}
        parts = [
            self._read_file(path, values, names, schema)
            for path, values in self.files
            if all(values[key] in choice for key, choice in wanted.items())
        ]
        shape = pa.schema([schema.field(name) for name in names])
        return pa.concat_tables(parts) if parts else shape.empty_table()

    def _read_file(
        self, path: str, values: Mapping[str, object], names: list[str], schema: pa.Schema
    ) -> pa.Table:
        stored = [name for name in names if name not in values]
        root = unquote(self.table.table_uri.removeprefix("file://"))
        try:
            file = _parquet(place(root) / path)
        except FileNotFoundError:
            raise UserError(
                f"version {self.version} of table {self.contract.name} has been vacuumed "
                f"({path} is gone): rebuild it, or read a newer version"
            ) from None
        rows = file.read(columns=stored)
        arrays = [
            pa.repeat(pa.scalar(values[name], schema.field(name).type), rows.num_rows)
            if name in values
            else rows[name].cast(schema.field(name).type)
            for name in names
        ]
        return pa.table(arrays, schema=pa.schema([schema.field(name) for name in names]))


def _parquet(file: Place) -> pq.ParquetFile:
    if isinstance(file, Path):
        return pq.ParquetFile(file)
    return pq.ParquetFile(file.path, filesystem=file.fs)


def _choices(value: object) -> set[object]:
    many = isinstance(value, Iterable) and not isinstance(value, str)
    return set(cast(Iterable[object], value)) if many else {value}


def snapshot(lake: Lake, contract: Contract, version: int | None = None) -> Snapshot:
    """A table at a version; raises UserError where it is missing or of another spec."""
    table = lake.open(contract.name, version)
    actions = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    files = tuple(
        sorted(
            (
                (row["path"], {key: row[f"partition.{key}"] for key in contract.partition_by})
                for row in actions
            ),
            key=lambda file: (*map(str, file[1].values()), file[0]),
        )
    )
    return Snapshot(contract, table.version(), files, table)


def replace(
    lake: Lake, contract: Contract, rows: pa.Table, where: str, inputs: Mapping[str, object]
) -> int:
    """Replace the rows that `where` selects, in one commit; returns the new version."""
    create(lake, contract)
    write_deltalake(
        lake.path(contract.name),
        rows.select(list(contract.columns)).cast(arrow_schema(contract)),
        mode="overwrite",
        predicate=where,
        commit_properties=CommitProperties(
            custom_metadata={"facts": provenance(spec=lake.spec.hash, inputs=dict(inputs))}
        ),
    )
    return lake.version(contract.name)
