"""Tables as Arrow, without a JVM: read partitions of a version, replace rows in one commit."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, write_deltalake

from etl.errors import UserError
from etl.tables.lake import Lake, arrow_schema, commit_metadata, create_table, table_root
from etl.tables.table_schema import TableSchema
from etl.tables.uri import StoragePath, resolve_uri


@dataclass(frozen=True)
class Snapshot:
    """One version of a table; `files` are its data files with their partition values."""

    schema: TableSchema
    version: int
    files: tuple[tuple[str, dict[str, object]], ...]
    table: DeltaTable

    def days(self) -> list[date]:
        """Days that have rows."""
        return sorted({cast(date, partition["day"]) for _, partition in self.files})

    def single_file(self, path: str) -> "Snapshot":
        """The same version, restricted to one of its files."""
        return replace(self, files=tuple(file for file in self.files if file[0] == path))

    def read(self, columns: Sequence[str] | None = None, **partition: object) -> pa.Table:
        """Rows of the partitions that match, for example `read(day=day, bucket=[0, 1])`.

        Args:
            columns: Names of the columns to read; by default all, in the order of the schema.
            partition: By partition column, one value or a collection of values to keep.
        """
        return self._read_files(columns, partition, lambda file, stored: [file.read(stored)])

    def read_matching(
        self,
        key: str,
        values: pa.Array,
        columns: Sequence[str] | None = None,
        **partition: object,
    ) -> pa.Table:
        """The rows of `read` whose column `key`, one of `columns`, is among some values.

        Row groups are read one by one, and those that cannot have such rows are not read.
        """
        ordered = values.sort()

        def read_groups(file: pq.ParquetFile, stored: list[str]) -> list[pa.Table]:
            groups = [n for n in range(file.num_row_groups) if _may_match(file, n, key, ordered)]
            rows = (file.read_row_group(number, columns=stored) for number in groups)
            return [group.filter(pc.is_in(group[key], ordered)) for group in rows]

        return self._read_files(columns, partition, read_groups)

    def take(self, positions: Sequence[int]) -> pa.Table:
        """Rows at ascending positions of a single file; only their row groups are read."""

        def read_groups(file: pq.ParquetFile, stored: list[str]) -> list[pa.Table]:
            sizes = [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)]
            groups, end = [], 0
            for number, size in enumerate(sizes):
                first, end = end, end + size
                if rows := [row - first for row in positions if first <= row < end]:
                    groups.append(file.read_row_group(number, columns=stored).take(rows))
            return groups

        assert len(self.files) == 1
        return self._read_files(None, {}, read_groups)

    def _read_files(
        self,
        columns: Sequence[str] | None,
        partition: Mapping[str, object],
        read_rows: Callable[[pq.ParquetFile, list[str]], list[pa.Table]],
    ) -> pa.Table:
        """The rows that `read_rows` returns of the files of the partitions that match."""
        names = list(columns or self.schema.columns)
        schema = arrow_schema(self.schema)
        selected = {key: _as_set(value) for key, value in partition.items()}
        fields = [schema.field(name) for name in names]
        parts: list[pa.Table] = []
        for path, values in self.files:
            if all(values[key] in choice for key, choice in selected.items()):
                stored = [name for name in names if name not in values]
                rows = read_rows(self._open_file(path, values, stored), stored)
                parts += [_with_partition(part, values, fields) for part in rows]
        return pa.concat_tables(parts) if parts else pa.schema(fields).empty_table()

    def _open_file(
        self, path: str, partition: Mapping[str, object], columns: list[str]
    ) -> pq.ParquetFile:
        """A data file of the table, which has some columns."""
        try:
            file = _open_parquet(resolve_uri(table_root(self.table)) / path)
        except FileNotFoundError:
            raise UserError(
                f"version {self.version} of table {self.schema.name} has been vacuumed "
                f"({path} is gone): rebuild it, or read a newer version"
            ) from None
        stored = set(file.schema_arrow.names)
        missing = [name for name in columns if name not in stored]
        if missing:
            raise UserError(
                f"table {self.schema.name} lacks {', '.join(missing)}, because an earlier version "
                f"of Gemline wrote its rows of {partition.get('day', 'some days')}: write these "
                "days again"
            )
        return file


def _with_partition(
    rows: pa.Table, partition: Mapping[str, object], fields: Sequence[pa.Field]
) -> pa.Table:
    """Rows of a file with the columns that its partition stands for."""
    arrays = [
        pa.repeat(pa.scalar(partition[field.name], field.type), rows.num_rows)
        if field.name in partition
        else rows[field.name].cast(field.type)
        for field in fields
    ]
    return pa.table(arrays, schema=pa.schema(fields))


def _may_match(file: pq.ParquetFile, group: int, key: str, ordered: pa.Array) -> bool:
    """Whether a row group may have a row with one of some values, by its statistics."""
    metadata = file.metadata.row_group(group)
    columns = (metadata.column(number) for number in range(metadata.num_columns))
    statistics = next(c.statistics for c in columns if c.path_in_schema == key)
    if statistics is None or not statistics.has_min_max:
        return True
    first = bisect_left(ordered, statistics.min, key=lambda value: value.as_py())
    return first < len(ordered) and ordered[first].as_py() <= statistics.max


def _open_parquet(file: StoragePath) -> pq.ParquetFile:
    if isinstance(file, Path):
        return pq.ParquetFile(file)
    return pq.ParquetFile(file.path, filesystem=file.fs)


def _as_set(value: object) -> set[object]:
    if isinstance(value, Iterable) and not isinstance(value, str):
        return set(cast(Iterable[object], value))
    return {value}


def snapshot(lake: Lake, schema: TableSchema, version: int | None = None) -> Snapshot:
    """A table at a version; raises UserError if it is missing or of another spec."""
    table = lake.open(schema.name, version)
    actions = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    files = [
        (action["path"], {key: action[f"partition.{key}"] for key in schema.partition_by})
        for action in actions
    ]
    files.sort(key=lambda file: (*map(str, file[1].values()), file[0]))
    return Snapshot(schema, table.version(), tuple(files), table)


def replace_rows(
    lake: Lake,
    schema: TableSchema,
    rows: pa.Table,
    predicate: str,
    input_versions: Mapping[str, object],
) -> int:
    """Replace the rows that `predicate` selects, in one commit; returns the new version.

    The commit records `input_versions`, the versions of the tables that were read.
    """
    create_table(lake, schema)
    metadata = commit_metadata(spec=lake.spec.hash, inputs=dict(input_versions))
    write_deltalake(
        lake.table_uri(schema.name),
        rows.select(list(schema.columns)).cast(arrow_schema(schema)),
        mode="overwrite",
        predicate=predicate,
        schema_mode="merge",  # a table of an earlier version may lack columns
        commit_properties=CommitProperties(custom_metadata={"facts": metadata}),
    )
    return lake.version(schema.name)
