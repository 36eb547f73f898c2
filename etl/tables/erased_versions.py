"""Table versions from before an erasure: they hold erased users, and are neither pinned nor read.

`_pipeline/erasures.json` has, by table, its id and the first version after the last erasure.
"""

from typing import Annotated

from deltalake import DeltaTable
from pydantic import Field, TypeAdapter, ValidationError

from etl.errors import UserError
from etl.spec.base import StrictModel
from etl.tables import atomic_io
from etl.tables.lake import Lake
from etl.tables.uri import read_text_if_exists, resolve_uri


class ErasedTable(StrictModel):
    """A table from which users were erased."""

    table_id: str
    """The id in the metadata of the table; a table that is built again has another one."""
    first_version: Annotated[int, Field(ge=0)]
    """The first version after the erasure."""


ERASURES_FILE = "_pipeline", "erasures.json"
ERASED_TABLES = TypeAdapter(dict[str, ErasedTable])


def record_erasure(lake: Lake, names: list[str]) -> None:
    """Record that the versions before the current ones of these tables hold erased users."""
    tables = {name: lake.open(name) for name in names}
    erased = {
        name: ErasedTable(table_id=str(table.metadata().id), first_version=table.version())
        for name, table in tables.items()
    }
    text = ERASED_TABLES.dump_json(_read_erasures(lake) | erased).decode()
    atomic_io.write_text(resolve_uri(lake.root, *ERASURES_FILE), text)


def holds_erased_users(lake: Lake, name: str, version: int) -> bool:
    """Whether a version of a table is older than the last erasure from this table."""
    erased = _read_erasures(lake).get(name)
    if erased is None or version >= erased.first_version or not lake.exists(name):
        return False
    return str(DeltaTable(lake.table_uri(name)).metadata().id) == erased.table_id


def require_versions_after_erasures(lake: Lake) -> None:
    """Raise UserError if a pinned version of a table is older than the last erasure from it."""
    for name, version in sorted(lake.pinned_versions.items()):
        if holds_erased_users(lake, name, version):
            raise UserError(
                f"--pins: version {version} of table {name} holds users who have been erased "
                "since: leave --pins out, or on Airflow clear the task `publish_features` of the "
                "day's tables, which publishes the current versions"
            )


def _read_erasures(lake: Lake) -> dict[str, ErasedTable]:
    path = resolve_uri(lake.root, *ERASURES_FILE)
    text = read_text_if_exists(path)
    try:
        return {} if text is None else ERASED_TABLES.validate_json(text)
    except ValidationError:
        raise UserError(f"{path} is damaged: remove it, then repeat the last erasure") from None
