"""A lake: one folder a table, and what its transaction log says. Needs no JVM."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from etl.errors import UserError
from etl.spec.model import DataSpec
from etl.tables.codes import bind, read_codes
from etl.tables.place import place

SPEC_PROPERTY = "gemline.spec"
PROPERTIES = {
    "delta.enableDeletionVectors": "false",  # delta-rs cannot read them through Arrow
    "delta.logRetentionDuration": "interval 180 days",
    "delta.deletedFileRetentionDuration": "interval 180 days",
}


@dataclass(frozen=True)
class Lake:
    """The tables of one data spec below one folder or object-store URL.

    Tables are read at the versions `pins`, the others at their newest. Surfaces and event types of
    `spec` are put in the order of their codes in this lake.
    """

    root: str
    spec: DataSpec
    pins: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "spec", bind(self.spec, read_codes(self.root)))

    @property
    def properties(self) -> dict[str, str]:
        """Properties of each new table."""
        return PROPERTIES | {SPEC_PROPERTY: self.spec.hash}

    def path(self, name: str) -> str:
        """Where a table lies."""
        root = self.root.rstrip("/") if "://" in self.root else Path(self.root).absolute()
        return f"{root}/{name}"

    def exists(self, name: str) -> bool:
        """Whether a table has been written."""
        return bool(DeltaTable.is_deltatable(self.path(name)))

    def open(self, name: str, version: int | None = None) -> DeltaTable:
        """A table at a version (without one the pinned, else the newest).

        Raises UserError where there is none, or where it was written under another spec.
        """
        if not self.exists(name):
            raise UserError(
                f"table {name} is not in {self.root}; run the step that writes it first"
            )
        version = self.pins.get(name) if version is None else version
        table = DeltaTable(self.path(name), version=version)
        written_under = table.metadata().configuration.get(SPEC_PROPERTY)
        if written_under != self.spec.hash:
            raise UserError(
                f"table {name} in {self.root} was written under another spec ({written_under}; "
                f"spec {self.spec.name} is {self.spec.hash}): use another --lake, or the old spec"
            )
        return table

    def version(self, name: str) -> int:
        """The version at which a table is read: the pinned, else the newest."""
        return self.open(name).version()

    def rows(self, name: str, days: tuple[date, date] | None = None, **partition: object) -> int:
        """Rows of a table or of a partition, on all days or between two, by its log alone."""
        actions = self.files(name)
        if days:
            actions = _between(actions, days)
        for column, value in partition.items():
            actions = actions.filter(pc.equal(actions[f"partition.{column}"], value))
        return int(pc.sum(actions["num_records"]).as_py() or 0)

    def nulls(self, name: str, column: str, days: tuple[date, date]) -> int:
        """Rows of a table between two days that hold nothing in a column, by its log alone."""
        counts = _between(self.files(name), days)[f"null_count.{column}"]
        return int(pc.sum(counts).as_py() or 0)

    def days(self, name: str) -> tuple[date, date]:
        """The first and the last day that have rows in a table, by its log alone."""
        day = self.files(name)["partition.day"]
        return pc.min(day).as_py(), pc.max(day).as_py()

    def newest_day(self, name: str) -> date | None:
        """The last day that has rows in a table, by its log alone; None where there is no table."""
        if not self.exists(name):
            return None
        newest: date | None = pc.max(self.files(name)["partition.day"]).as_py()
        return newest

    def files(self, name: str) -> pa.Table:
        """The files of a table with their partitions and statistics, as its log tells them."""
        return pa.table(self.open(name).get_add_actions(flatten=True))


def _between(actions: pa.Table, days: tuple[date, date]) -> pa.Table:
    day = actions["partition.day"]
    return actions.filter(pc.and_(pc.greater_equal(day, days[0]), pc.less_equal(day, days[1])))


def provenance(**facts: object) -> str:
    """Facts about a write, as they go into its commit."""
    return json.dumps(facts, sort_keys=True, default=str)


def ensure_folder(root: str) -> None:
    """Make a lake's folder; an object store has none to make, but the bucket must be there.

    Raises UserError where it is not there, or may not be read; the store's own error where the
    store does not answer.
    """
    folder = place(root)
    if isinstance(folder, Path):
        folder.mkdir(parents=True, exist_ok=True)
        return
    try:
        folder.fs.info(folder.drive)
    except (FileNotFoundError, PermissionError) as error:
        raise UserError(
            f"{root}: {folder.drive} cannot be read ({error}); make it, and name the store and its "
            "keys (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)"
        ) from None
