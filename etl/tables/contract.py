"""What a table promises: its columns, what every row has, and which rules every row keeps."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Contract:
    """A table. `columns` maps names to Spark SQL types; rows of a file are in `order_by`.

    `required` are the columns that no row may lack, `rules` SQL conditions that a row keeps (or of
    which it lacks a column); both by what is said of a row that does not.
    """

    name: str
    columns: dict[str, str]
    partition_by: tuple[str, ...]
    order_by: tuple[str, ...] = ()
    required: dict[str, str] = field(default_factory=dict)
    rules: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = {*self.required.values(), *self.order_by, *self.partition_by} - {*self.columns}
        assert not unknown, f"contract {self.name} names columns that it lacks: {unknown}"

    @property
    def ddl(self) -> str:
        """The columns as a Spark DDL string."""
        return ", ".join(f"`{name}` {type_}" for name, type_ in self.columns.items())

    @property
    def never_null(self) -> frozenset[str]:
        """Columns that no row lacks: those required, and those that tell its partition."""
        return frozenset((*self.required.values(), *self.partition_by))

    @property
    def breaches(self) -> dict[str, str]:
        """SQL conditions of rows that break the contract, by what is said of them."""
        lacking = {said: f"`{name}` IS NULL" for said, name in self.required.items()}
        return lacking | {said: f"NOT {_kept(rule)}" for said, rule in self.rules.items()}

    @property
    def check(self) -> str | None:
        """All rules as one SQL condition, for the table to enforce; None where there are none."""
        return " AND ".join(map(_kept, self.rules.values())) or None


def _kept(rule: str) -> str:
    return f"coalesce({rule}, true)"
