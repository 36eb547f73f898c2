"""The pages of the documentation, their code blocks and commands."""

import re
import shlex
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

from tests.conftest import ROOT

DOCS = ROOT / "docs"
# Decision records are left out: their commands may be outdated.
PAGES = (
    ROOT / "README.md",
    *(page for page in sorted(DOCS.rglob("*.md")) if DOCS / "adr" not in page.parents),
)


def blocks(page: Path, language: str) -> list[str]:
    """The fenced code blocks of a language on a page."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def commands(tool: str) -> Iterator[list[str]]:
    """The words after `tool` of every command that a page shows, without redirections."""
    for page in PAGES:
        for block in blocks(page, "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == [tool]:
                    yield list(takewhile(lambda word: word != ">", words[1:]))
