"""Shared by the tests of the line and of Airflow."""

from pathlib import Path

from dags import standalone
from dags.line import Place
from tests.conftest import FIRST


def environment(folder: Path, spec: Path, raw: Path, port: int = 8080) -> dict[str, str]:
    """An Airflow of its own, with the DAGs of a lake in a folder."""
    place = Place(spec, str(raw), str(folder / "lake"))
    return standalone.environment(place, folder / "airflow", port, FIRST) | {
        "GEMLINE_GEM": "--scale tiny",
        "GEMLINE_DEADLINE_HOURS": "0",  # DAG.test() can't read a deadline back
    }
