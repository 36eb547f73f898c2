"""House rules that no linter checks; `make lint` runs those that one does."""

from benchmarks.house import FOLDERS, import_cycles, read_modules


def test_files_are_short() -> None:
    long = {
        str(module.path): lines
        for module in read_modules(*FOLDERS)
        if (lines := module.text.count("\n")) > 350
    }
    assert not long


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert not import_cycles()
