"""The house rules that a tool can see."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

BIN = Path(sys.executable).parent
FOLDERS = ("dags", "etl", "features", "training", "ranking", "benchmarks")


@pytest.mark.parametrize(
    "command",
    [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["lint-imports"], ["mypy"]],
    ids=["ruff", "format", "imports", "types"],
)
def test_tools_find_nothing(command: list[str]) -> None:
    done = subprocess.run(
        [BIN / command[0], *command[1:]], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_files_are_short() -> None:
    files = [f for folder in FOLDERS for f in (ROOT / folder).rglob("*.py")]
    long = {str(f): n for f in files if (n := f.read_text().count("\n")) > 350}
    assert not long


def test_no_file_hides_a_module_of_python() -> None:
    """A file that spark-submit runs finds its neighbours first."""
    files = [f for folder in FOLDERS for f in (ROOT / folder).rglob("*.py")]
    assert not [f"{f}" for f in files if f.stem in sys.stdlib_module_names]
