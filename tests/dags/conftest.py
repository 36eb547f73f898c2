"""Shared by the tests of the line and of Airflow."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dags import standalone
from dags.line import Place
from etl.spec import load_spec
from etl.tables.lake import Lake
from tests.conftest import FIRST, Tables
from tests.small_line import SmallLine
from tests.world import unchanged


@pytest.fixture(scope="session")
def small_line(tables: Tables) -> SmallLine:
    return tables.small_line


@pytest.fixture(scope="session")
def small_lake(tables: Tables) -> Iterator[Lake]:
    """The tables of the small line, made as one range. Tests must not write to it."""
    with unchanged(tables.small_lake):
        yield Lake(str(tables.small_lake), load_spec(tables.small_line.spec))


def environment(folder: Path, spec: Path, raw: Path, port: int = 8080) -> dict[str, str]:
    """An Airflow of its own, with the DAGs of a lake in a folder."""
    place = Place(spec, str(raw), str(folder / "lake"))
    return standalone.environment(place, folder / "airflow", port, FIRST) | {
        "GEMLINE_GEM": "--scale tiny",
        "GEMLINE_DEADLINE_HOURS": "0",  # DAG.test() can't read a deadline back
    }
