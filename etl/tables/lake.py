"""A lake: Delta tables below one folder or URL, created and inspected without a JVM.

Row counts, null counts and days are read from the statistics in the Delta log, without the data.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from etl.errors import UserError
from etl.spec.model import DataSpec
from etl.spec.units import DayRange
from etl.tables.code_registry import assign_codes, read_codes, register_codes
from etl.tables.schemas import NO_DAY
from etl.tables.table_schema import TableSchema
from etl.tables.uri import is_url, read_text_if_exists, resolve_uri

SPEC_PROPERTY = "gemline.spec"
ABSENT = -1  # the pinned version of a table that did not exist
REPARTITIONING = "repartitioning"  # in place of the hash while a table is being repartitioned
TABLE_PROPERTIES = {
    "delta.enableDeletionVectors": "false",  # delta-rs cannot read them through Arrow
    "delta.logRetentionDuration": "interval 180 days",
    "delta.deletedFileRetentionDuration": "interval 180 days",
}


@dataclass(frozen=True)
class Lake:
    """The tables of one data spec below one folder or object-store URL.

    Attributes:
        root: Folder or URL; each table is a folder in it.
        spec: The data spec, with surfaces and event types in the order of their codes in this lake.
        pinned_versions: Versions at which tables are read; the others are read at their latest.
    """

    root: str
    spec: DataSpec
    pinned_versions: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "spec", assign_codes(self.spec, read_codes(self.root)))

    @property
    def table_properties(self) -> dict[str, str]:
        """Delta properties of new tables."""
        return TABLE_PROPERTIES | {SPEC_PROPERTY: self.spec.hash}

    def table_uri(self, name: str) -> str:
        """Path or URL of a table."""
        root = self.root.rstrip("/") if is_url(self.root) else Path(self.root).absolute()
        return f"{root}/{name}"

    def exists(self, name: str) -> bool:
        """Whether a table has been created, or had been when its version was pinned."""
        if self.pinned_versions.get(name) == ABSENT:
            return False
        return bool(DeltaTable.is_deltatable(self.table_uri(name)))

    def pinned(self, names: Iterable[str]) -> "Lake":
        """This lake with tables pinned at the versions at which they are read now.

        Those that do not exist yet are read as absent, even if they are created later.
        """
        versions = {name: self.version(name) if self.exists(name) else ABSENT for name in names}
        return replace(self, pinned_versions={**self.pinned_versions, **versions})

    def open(self, name: str, version: int | None = None) -> DeltaTable:
        """A table at a version; by default at the pinned one, else at the latest.

        Raises UserError if the table does not exist, was written under another spec, or is being
        repartitioned.
        """
        if not self.exists(name):
            raise UserError(
                f"table {name} is not in {self.root}; run the step that writes it first"
            )
        version = self.pinned_versions.get(name) if version is None else version
        try:
            table = DeltaTable(self.table_uri(name), version=version)
        except DeltaError:
            if version is None:
                raise
            raise UserError(
                f"version {version} of table {name} is no longer in {self.root}: build what reads "
                "it again, from newer versions"
            ) from None
        written_under = table.metadata().configuration.get(SPEC_PROPERTY)
        if written_under == REPARTITIONING:
            raise UserError(
                f"table {name} in {self.root} is being repartitioned; if no command is doing that, "
                "run `gemline upgrade` again"
            )
        if written_under != self.spec.hash:
            raise UserError(
                f"table {name} in {self.root} was written under another spec ({written_under}; "
                f"spec {self.spec.name} is {self.spec.hash}): use another --lake, or the old spec"
            )
        return table

    def version(self, name: str) -> int:
        """The version at which a table is read: the pinned one, else the latest."""
        return self.open(name).version()

    def count_rows(self, name: str, days: DayRange | None = None, **partition: object) -> int:
        """Rows of a table, of all days or a range of days, and of all or some partitions."""
        actions = self.add_actions(name)
        if days:
            actions = _filter_days(actions, days)
        actions = _filter_partition(actions, partition)
        return int(pc.sum(actions["num_records"]).as_py() or 0)

    def rows_by_day(self, name: str, **partition: object) -> dict[date, int]:
        """Rows of a table by day, of all or some other partitions; empty if it does not exist."""
        if not self.exists(name):
            return {}
        actions = _filter_partition(self.add_actions(name), partition)
        sums = actions.group_by("partition.day").aggregate([("num_records", "sum")])
        days, rows = (sums[c].to_pylist() for c in ("partition.day", "num_records_sum"))
        return dict(zip(days, rows, strict=True))

    def count_nulls(self, name: str, column: str, days: DayRange) -> int:
        """Rows of a range of days in which a column is null."""
        counts = _filter_days(self.add_actions(name), days)[f"null_count.{column}"]
        return int(pc.sum(counts).as_py() or 0)

    def day_range(self, name: str) -> DayRange:
        """The first and the last day that have rows."""
        day = self.add_actions(name)["partition.day"]
        return pc.min(day).as_py(), pc.max(day).as_py()

    def latest_day(self, name: str, before: date | None = None) -> date | None:
        """The last day that has rows, of all days or of those before a day.

        None if the table does not exist or has no rows on them.
        """
        if not self.exists(name):
            return None
        day = self.add_actions(name)["partition.day"]
        if before is not None:
            day = day.filter(pc.less(day, before))
        latest: date | None = pc.max(day).as_py()
        return latest

    def last_ingested_day(self) -> date | None:
        """The last day that was ingested, whether or not any of its events was kept."""
        days = [self.latest_day(name) for name in ("events", "ingest_metrics")]
        return max((day for day in days if day is not None and day != NO_DAY), default=None)

    def add_actions(self, name: str) -> pa.Table:
        """The add actions of a table's log: its files with their partitions and statistics."""
        return pa.table(self.open(name).get_add_actions(flatten=True))


def _filter_days(actions: pa.Table, days: DayRange) -> pa.Table:
    day = actions["partition.day"]
    return actions.filter(pc.and_(pc.greater_equal(day, days[0]), pc.less_equal(day, days[1])))


def _filter_partition(actions: pa.Table, partition: Mapping[str, object]) -> pa.Table:
    for column, value in partition.items():
        actions = actions.filter(pc.equal(actions[f"partition.{column}"], value))
    return actions


def commit_metadata(**values: object) -> str:
    """JSON metadata of a commit."""
    return json.dumps(values, sort_keys=True, default=str)


def table_root(table: DeltaTable) -> str:
    """The folder or URL of a table, as it was opened: delta-rs returns the URL of a folder."""
    uri = table.table_uri
    return unquote(uri.removeprefix("file://")) if uri.startswith("file://") else uri


def last_commit_metadata(table: DeltaTable) -> dict[str, Any]:
    """What the last write until a table's version recorded, by Spark or by `etl.tables.arrow`.

    Commits of maintenance, such as vacuum, record nothing and are skipped. Empty without a write.
    Entries of the log are read from that of the version backwards, until one has metadata:
    `DeltaTable.history` begins with the latest commit whatever the table's version is.
    """
    entries = resolve_uri(table_root(table), "_delta_log")
    for version in range(table.version(), -1, -1):
        entry = read_text_if_exists(entries / f"{version:020d}.json")
        if entry is None:  # the entries before it have expired
            break
        if recorded := _recorded_in(entry):
            return dict(json.loads(recorded))
    return {}


def _recorded_in(entry: str) -> str | None:
    """The metadata in an entry of a table's log, of Spark or of `etl.tables.arrow`."""
    for line in entry.splitlines():
        if commit := json.loads(line).get("commitInfo"):
            recorded: str | None = commit.get("userMetadata") or commit.get("facts")
            return recorded
    return None


def ensure_lake_root(root: str) -> None:
    """Make the folder of a lake; in an object store, check that the bucket exists.

    Raises UserError if the folder cannot be made, or the bucket does not exist or may not be read.
    Other errors of the store are passed on.
    """
    folder = resolve_uri(root)
    if isinstance(folder, Path):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError, PermissionError) as error:
            raise UserError(
                f"{root} cannot be the folder of a lake ({error.strerror}): name another --lake"
            ) from None
        return
    try:
        folder.fs.info(folder.drive)
    except (FileNotFoundError, PermissionError) as error:
        raise UserError(
            f"{root}: {folder.drive} cannot be read ({error}); make it, and name the store and its "
            "keys (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)"
        ) from None


ARROW_TYPES = {
    "string": pa.string(),
    "tinyint": pa.int8(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "binary": pa.binary(),
}


def arrow_type(sql_type: str) -> pa.DataType:
    """The Arrow type of a Spark SQL type, such as `bigint` or `array<float>`."""
    if sql_type.startswith("array<"):
        return pa.list_(arrow_type(sql_type[6:-1]))
    return ARROW_TYPES[sql_type]


def arrow_schema(schema: TableSchema) -> pa.Schema:
    """The Arrow schema of a table."""
    return pa.schema([(name, arrow_type(type_)) for name, type_ in schema.columns.items()])


# The lowest protocol under which every writer enforces the constraints.
DELTA_PROTOCOL = {"delta.minReaderVersion": "1", "delta.minWriterVersion": "3"}


def create_table(lake: Lake, schema: TableSchema, properties: Mapping[str, str] = {}) -> None:
    """Create a table unless it exists: columns, partitions, non-null columns and constraints.

    `properties` are further Delta properties of a table that is created. Raises UserError if the
    table exists and was written under another spec.
    """
    if lake.exists(schema.name):
        lake.open(schema.name)
        return
    register_codes(lake.root, lake.spec)
    fields = [
        pa.field(name, arrow_type(type_), nullable=name not in schema.non_nullable)
        for name, type_ in schema.columns.items()
    ]
    configuration = lake.table_properties | DELTA_PROTOCOL | schema.delta_properties
    DeltaTable.create(
        lake.table_uri(schema.name),
        pa.schema(fields),
        mode="ignore",
        partition_by=list(schema.partition_by),
        configuration={**configuration, **properties},
        raise_if_key_not_exists=False,
    )
