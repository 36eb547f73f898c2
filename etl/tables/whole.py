"""Files and folders that appear whole or not at all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from etl.tables.place import Place, here


@contextmanager
def file(place: Place) -> Iterator[Path]:
    """Where to write a file; it moves to its place when the block ends without an error."""
    made = _beside(place)
    made.parent.mkdir(parents=True, exist_ok=True)
    yield made
    if isinstance(place, Path):
        made.replace(place)
    else:
        place.fs.put_file(str(made), place.path)
        made.unlink()


def fresh(place: Place) -> Path:
    """An empty folder of this machine in which to write what `put` moves to a place."""
    made = _beside(place)
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    return made


def put(place: Place, made: Path | None = None) -> None:
    """Move a folder to its place, by default the one that `fresh` gave for it.

    What was there goes only when the new one is ready. An object store has it file by file: name
    it elsewhere when it is there.
    """
    made = made or _beside(place)
    if not isinstance(place, Path):
        place.fs.put(f"{made}/", f"{place.path}/", recursive=True)
        place = here(place)
    old = place.with_name(f".{place.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        place.rename(old)
    made.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def remove(folder: Place) -> None:
    """Remove a folder and all in it, wherever it is there."""
    shutil.rmtree(here(folder), ignore_errors=True)
    if not isinstance(folder, Path) and folder.exists():
        folder.rmdir(recursive=True)


def _beside(place: Place) -> Path:
    where = here(place)
    return where.with_name(f".{where.name}.new")
