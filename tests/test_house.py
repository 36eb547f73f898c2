"""House rules that no linter checks; `make lint` runs those that one does."""

import sys

from benchmarks.house import FOLDERS, import_cycles, read_modules


def test_files_are_short() -> None:
    long = {
        str(module.path): lines
        for module in read_modules(*FOLDERS)
        if (lines := module.text.count("\n")) > 350
    }
    assert not long


def test_no_file_hides_a_module_of_python() -> None:
    """A file that Python is started with finds its neighbours first."""
    modules = read_modules(*FOLDERS)
    assert not [str(m.path) for m in modules if m.path.stem in sys.stdlib_module_names]


def test_there_are_no_import_cycles() -> None:
    assert not import_cycles()
