"""The pages of the documentation, and what they show."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import ROOT

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def commands(tool: str) -> Iterator[list[str]]:
    """Words of every command of a tool that a page shows."""
    for page in PAGES:
        for block in blocks(page, "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == [tool]:
                    yield words[1:]
