"""What a longer study found: a table, and what its picture shows. The report draws it."""

from datetime import UTC, datetime
from pathlib import Path

from pydantic import Field
from rich.console import Console
from rich.table import Table

from etl.spec.base import Strict
from etl.tables import atomic_io
from etl.tables.place import Place, listed


def today() -> str:
    """The date, in UTC."""
    return f"{datetime.now(UTC):%Y-%m-%d}"


class Study(Strict):
    """A table of text; `curves` are points (x, y) by name, `intervals` a number with its bounds."""

    title: str
    command: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    date: str = Field(default_factory=today)
    curves: dict[str, tuple[tuple[float, float], ...]] = {}
    intervals: dict[str, tuple[float, float, float]] = {}

    def show(self) -> None:
        """Print the table."""
        table = Table(*self.columns, title=self.title)
        for row in self.rows:
            table.add_row(*row)
        Console().print(table)

    def keep(self, path: Path) -> None:
        """Write it where the report finds it: `studies` in a lake, or benchmarks/results."""
        atomic_io.write_text(path, self.model_dump_json(indent=1) + "\n")


def kept(folder: Place) -> list[Study]:
    """The studies of a folder, by name."""
    return [Study.model_validate_json(path.read_text()) for path in listed(folder, "*.json")]
