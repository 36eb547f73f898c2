"""The schema of a table: its columns, partitions and order, and the rules that all rows obey."""

from dataclasses import dataclass, field
from typing import Literal

PARTITION_COLUMNS = {"day": "date", "bucket": "int"}


@dataclass(frozen=True)
class UserRows:
    """How `gemline erase` finds the rows of a user.

    Attributes:
        key: The id, its hash (`sampled_user`), an impression of the user, or a record of the user.
        known_second: SQL for the second from which a row was known; None: that of the event of its
            impression.
    """

    key: Literal["user_id", "sampled_user", "impression_id", "payload"]
    known_second: str | None


@dataclass(frozen=True)
class TableSchema:
    """The schema of one table.

    Attributes:
        name: Name of the table.
        columns: Spark SQL type of each column.
        partition_by: Columns that the table is partitioned by.
        order_by: Columns that the rows of a file are sorted by.
        required_columns: Columns that may not be null, by the reason given for a row that has none.
        constraints: SQL conditions that hold for each row (or are null), by the reason given for a
            row that breaks one.
        user_rows: How the rows of a user are found; None if the table is about no user.
        statistics: Columns whose null counts and bounds the log holds for each file. Each reader of
            a table reads its log, which should not be larger than needed.
    """

    name: str
    columns: dict[str, str]
    partition_by: tuple[str, ...]
    order_by: tuple[str, ...] = ()
    required_columns: dict[str, str] = field(default_factory=dict)
    constraints: dict[str, str] = field(default_factory=dict)
    user_rows: UserRows | None = field(kw_only=True, repr=False)  # not in fingerprints
    statistics: tuple[str, ...] = field(default=(), kw_only=True, repr=False)

    def __post_init__(self) -> None:
        named = {*self.required_columns.values(), *self.order_by, *self.partition_by}
        named |= {*self.statistics}
        unknown = named - {*self.columns}
        assert self.user_rows is None or self.user_rows.key in self.columns, self.name
        assert not unknown, f"the schema of {self.name} names columns that it lacks: {unknown}"

    @property
    def ddl(self) -> str:
        """The columns as a Spark DDL string."""
        return ", ".join(f"`{name}` {sql_type}" for name, sql_type in self.columns.items())

    @property
    def delta_properties(self) -> dict[str, str]:
        """Delta properties of the table: its constraints, and what statistics the log holds."""
        properties = {"delta.dataSkippingNumIndexedCols": "0"}
        if self.statistics:
            properties = {"delta.dataSkippingStatsColumns": ",".join(self.statistics)}
        if self.check_constraint:
            properties["delta.constraints.row_constraints"] = self.check_constraint
        return properties

    @property
    def non_nullable(self) -> frozenset[str]:
        """Columns that are never null: the required ones and those of the partition."""
        return frozenset((*self.required_columns.values(), *self.partition_by))

    @property
    def violations(self) -> dict[str, str]:
        """SQL conditions of rows that violate the schema, by reason."""
        missing = {reason: f"`{name}` IS NULL" for reason, name in self.required_columns.items()}
        broken = {
            reason: f"NOT {_true_or_null(constraint)}"
            for reason, constraint in self.constraints.items()
        }
        return missing | broken

    @property
    def check_constraint(self) -> str | None:
        """All constraints as one SQL condition for Delta to enforce; None if there are none."""
        return " AND ".join(map(_true_or_null, self.constraints.values())) or None


def _true_or_null(constraint: str) -> str:
    return f"coalesce({constraint}, true)"
