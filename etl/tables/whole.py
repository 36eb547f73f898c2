"""Files and folders that appear whole or not at all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def beside(place: Path) -> Path:
    """Where a file or folder is written before it is moved to its place."""
    return place.with_name(f".{place.name}.new")


@contextmanager
def file(place: Path) -> Iterator[Path]:
    """Where to write a file; it moves to its place when the block ends without an error."""
    place.parent.mkdir(parents=True, exist_ok=True)
    made = beside(place)
    yield made
    made.replace(place)


def fresh(place: Path) -> Path:
    """The folder beside a place, empty."""
    made = beside(place)
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    return made


def put(place: Path, made: Path | None = None) -> None:
    """Move a folder to its place, by default the one beside it.

    What was there goes only when the new one is ready.
    """
    old = place.with_name(f".{place.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        place.rename(old)
    (made or beside(place)).rename(place)
    shutil.rmtree(old, ignore_errors=True)
