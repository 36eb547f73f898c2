"""Rules of the code base that no linter checks; `make lint` checks the others."""

import ast
import sys
from pathlib import Path

import yaml

from benchmarks.code_quality import (
    BANNED_NAMES,
    FOLDERS,
    ROOT,
    Module,
    banned_identifiers,
    import_cycles,
    read_module,
    read_modules,
    words_of,
)

MAX_FILE_LINES = 350


def test_files_are_short() -> None:
    lines = {str(module.path): module.text.count("\n") for module in read_modules(*FOLDERS)}
    assert not {path: count for path, count in lines.items() if count > MAX_FILE_LINES}


def test_no_file_is_named_like_a_module_of_the_standard_library() -> None:
    """The folder of a script comes first on Python's path."""
    modules = read_modules(*FOLDERS)
    assert not [str(m.path) for m in modules if m.path.stem in sys.stdlib_module_names]


def test_there_are_no_import_cycles() -> None:
    assert not import_cycles()


def test_banned_identifiers_are_listed_with_file_line_and_replacement() -> None:
    text = "def read(path):\n    lane = path\n    return lane\n\n\nclass ForetoldRows: ...\n"
    module = Module(Path("etl/example.py"), text, ast.parse(text))
    assert sorted(banned_identifiers([module])) == [
        "etl/example.py:2: lane: instead of 'lane' write shard",
        "etl/example.py:6: ForetoldRows: instead of 'foretold' write predicted, prequential",
    ]


def test_the_replacements_of_banned_words_are_not_banned() -> None:
    banned: dict[str, str] = yaml.safe_load(BANNED_NAMES.read_text())
    assert list(banned) == sorted(banned)
    for word, replacement in banned.items():
        assert words_of(word) == [word]
        assert not set(words_of(replacement)) & set(banned), word


def test_no_identifier_uses_a_banned_word() -> None:
    modules = [*read_modules(*FOLDERS, "tests"), read_module(ROOT / "gemline.py")]
    assert not banned_identifiers(modules)
