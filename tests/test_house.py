"""House rules that no linter checks; `make lint` runs those that one does."""

import sys

from tests.conftest import ROOT

FOLDERS = ("dags", "etl", "features", "training", "ranking", "benchmarks")


def test_files_are_short() -> None:
    files = [f for folder in FOLDERS for f in (ROOT / folder).rglob("*.py")]
    long = {str(f): n for f in files if (n := f.read_text().count("\n")) > 350}
    assert not long


def test_no_file_hides_a_module_of_python() -> None:
    """A file that spark-submit runs finds its neighbours first."""
    files = [f for folder in FOLDERS for f in (ROOT / folder).rglob("*.py")]
    assert not [f"{f}" for f in files if f.stem in sys.stdlib_module_names]
