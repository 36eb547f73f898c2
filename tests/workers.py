"""How tests are dealt out to pytest-xdist workers: one of them has Spark, files stay whole."""

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parents[1]
MARK = "pytestmark = pytest.mark.spark"


class OneSparkWorker(LoadFileScheduling):
    """Deals out whole files; those that use Spark are one unit of work, so one JVM is enough."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "spark" if is_marked(ROOT / file) else file


@cache
def is_marked(file: Path) -> bool:
    """Whether a file says that it uses Spark. The controller of the workers imports no tests."""
    return MARK in file.read_text().splitlines()


def in_order(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Tests in the order in which files are dealt out; otherwise as they were.

    Files with Spark come first, and of those the ones on the shared tables, as they build them.
    The other worker begins with the files that do not need those tables. Raises UsageError where a
    file uses Spark without saying so.
    """
    fixtures: dict[Path, set[str]] = defaultdict(set)
    for item in items:
        fixtures[item.path] |= set(getattr(item, "fixturenames", ()))
    for path, names in fixtures.items():
        if "spark" in names and not is_marked(path):
            raise pytest.UsageError(f"{path} uses Spark: write `{MARK}` below its imports")

    def place(item: pytest.Item) -> int:
        needs_tables = "tables" in fixtures[item.path]
        if is_marked(item.path):
            return 0 if needs_tables else 1
        return 3 if needs_tables else 2

    return sorted(items, key=place)
