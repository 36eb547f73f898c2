"""The result of a study: a table, and the data of its figure."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import Field
from rich.console import Console
from rich.table import Table

from etl.spec.base import StrictModel
from etl.tables import atomic_io
from etl.tables.uri import StoragePath, list_matching


def today() -> str:
    """Today's date in UTC, as text."""
    return f"{datetime.now(UTC):%Y-%m-%d}"


class StudyResult(StrictModel):
    """A table of text, and figures: `curves` are points (x, y), `intervals` (value, low, high).

    `estimates` (value, standard error, degrees of freedom) are those behind the intervals, so that
    rows can be added to a study. `figures` are the metrics of the study by key. `commit` names the
    commits of its trainings, where these are recorded, else that of the code that saved the study.
    """

    title: str
    command: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    date: str = Field(default_factory=today)
    commit: str = ""
    figures: dict[str, Any] = {}
    curves: dict[str, tuple[tuple[float, float], ...]] = {}
    intervals: dict[str, tuple[float, float, float]] = {}
    estimates: dict[str, tuple[float, float, float]] = {}

    def print_table(self) -> None:
        """Print the table."""
        table = Table(*self.columns, title=self.title)
        for row in self.rows:
            table.add_row(*row)
        Console().print(table)

    def save(self, path: Path) -> None:
        """Write as JSON; the report of a lake shows the files of its folder `studies`."""
        atomic_io.write_text(path, self.model_dump_json(indent=1) + "\n")


def load_studies(folder: StoragePath) -> list[StudyResult]:
    """The studies of a folder, sorted by file name."""
    return [
        StudyResult.model_validate_json(path.read_text())
        for path in list_matching(folder, "*.json")
    ]
