"""Metadata of tables, as `gemline etl table-info` reports it: version, rows, schema fingerprint."""

import hashlib
from collections.abc import Iterable
from datetime import date

from etl.spec.base import StrictModel
from etl.tables.lake import Lake
from etl.tables.schemas import table_schema
from etl.tables.table_schema import TableSchema


class TableMetadata(StrictModel):
    """Metadata of one table."""

    version: int
    """The version at which the lake reads the table."""
    rows: int
    """Rows on the given days; of a table without days, all rows."""
    schema_fingerprint: str
    """Hash of the schema."""


def table_metadata(
    lake: Lake, tables: Iterable[str], days: tuple[date, date]
) -> dict[str, TableMetadata]:
    """The metadata of some tables, by name; raises UserError where a table does not exist."""
    metadata = {}
    for name in tables:
        schema = table_schema(lake.spec, name)
        metadata[name] = TableMetadata(
            version=lake.version(name),
            rows=lake.count_rows(name, days if "day" in schema.partition_by else None),
            schema_fingerprint=schema_fingerprint(schema),
        )
    return metadata


def schema_fingerprint(schema: TableSchema) -> str:
    """Twelve hex digits that change with the columns, partitions, order and rules of a schema."""
    return hashlib.sha256(repr(schema).encode()).hexdigest()[:12]
