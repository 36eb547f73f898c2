"""Scheduling of pytest-xdist workers: whole files, and all files with Spark on one worker."""

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parents[1]
SPARK_MARK = "pytestmark = pytest.mark.spark"


class OneSparkWorker(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """Schedules whole files; files that use Spark are one unit of work and share one JVM."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "spark" if uses_spark(ROOT / file) else file


@cache
def uses_spark(file: Path) -> bool:
    """Whether a file is marked as using Spark; read as text, as the controller imports no tests."""
    return SPARK_MARK in file.read_text().splitlines()


def in_scheduling_order(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Tests in the order in which their files are scheduled; a stable sort.

    Files with Spark come first, those that need the shared tables before the others, because they
    build them. The other worker starts with the files that do not need those tables. Raises
    UsageError where a file uses Spark without the mark.
    """
    fixtures: dict[Path, set[str]] = defaultdict(set)
    for item in items:
        fixtures[item.path] |= set(getattr(item, "fixturenames", ()))
    for path, names in fixtures.items():
        if "spark" in names and not uses_spark(path):
            raise pytest.UsageError(f"{path} uses Spark: write `{SPARK_MARK}` below its imports")

    def priority(item: pytest.Item) -> int:
        needs_tables = "tables" in fixtures[item.path]
        if uses_spark(item.path):
            return 0 if needs_tables else 1
        return 3 if needs_tables else 2

    return sorted(items, key=priority)
