"""Files and folders that are complete or absent, also after a crash or a power loss.

On a disk: written under a temporary name, fsynced, renamed, and the folder fsynced. An object store
puts a file completely or not at all, but folders file by file: what has several files is used only
once a file that is put last names it.
"""

import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from upath import UPath

from etl.tables.place import Place, here

ABANDONED_AFTER = 24 * 3600  # seconds: whoever wrote to a temporary name then was killed


@contextmanager
def replace_file(place: Place) -> Iterator[Path]:
    """A temporary path; what is written there replaces the file if the block ends without error."""
    temporary = _temporary_path(here(place))
    make_folder(temporary.parent)
    try:
        yield temporary
        if isinstance(place, Path):
            fsync(temporary)
            temporary.replace(place)
            fsync(place.parent)
        else:
            place.fs.put_file(str(temporary), place.path)
    finally:
        temporary.unlink(missing_ok=True)
    _remove_abandoned(temporary.parent)


def write_text(place: Place, text: str) -> None:
    """Replace a file by a text."""
    with replace_file(place) as temporary:
        temporary.write_text(text)


def create_file(place: Place, text: str) -> bool:
    """Write a file unless it exists; False where it does. Of several writers one succeeds."""
    try:
        if isinstance(place, Path):
            _link_file(place, text)
        else:
            place.fs.pipe_file(place.path, text.encode(), mode="create")
    except FileExistsError:
        return False
    return True


def _link_file(path: Path, text: str) -> None:
    """Give a complete file its name; raises FileExistsError where there is a file of that name."""
    temporary = _temporary_path(path)
    make_folder(path.parent)
    try:
        temporary.write_text(text)
        fsync(temporary)
        os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync(path.parent)


def staging_folder(place: Place) -> Path:
    """A new empty folder on this machine, to be filled and given to `publish_folder`."""
    made = _temporary_path(here(place))
    make_folder(made)
    return made


def publish_folder(staging: Path, place: Place) -> None:
    """Move a folder to its place; where that exists already it stays as it is.

    The name has to be fresh, or tell the content (by a digest of it).
    """
    for file in sorted(staging.rglob("*")):
        fsync(file)
        if not isinstance(place, Path) and file.is_file():
            _put_if_absent(file, place / file.relative_to(staging).as_posix())
    fsync(staging)
    _rename_folder(staging, here(place))


def remove_folder(folder: Place) -> None:
    """Remove a folder with all in it, and its copy on this machine; nothing if it is not there."""
    if not isinstance(folder, Path) and folder.exists():
        folder.rmdir(recursive=True)
    local = here(folder)
    if local.exists():
        removed = _temporary_path(local)
        local.rename(removed)  # what is half removed is not found under its name
        shutil.rmtree(removed)


def download(file: Place) -> Path:
    """A file that libraries can read: itself, or a new copy on this machine."""
    if isinstance(file, Path):
        return file
    copy = here(file)
    temporary = _temporary_path(copy)
    make_folder(copy.parent)
    file.fs.get_file(file.path, str(temporary))
    temporary.replace(copy)
    return copy


def local_path(folder: Place) -> Path:
    """A folder that libraries can read: itself, or a copy on this machine, made once.

    Its content must not change under its name. What is not there has no copy either.
    """
    copy = here(folder)
    if isinstance(folder, Path) or copy.is_dir() or not folder.is_dir():
        return copy
    make_folder(copy.parent)
    with tempfile.TemporaryDirectory(dir=copy.parent) as temporary:
        made = Path(temporary, "copy")
        folder.fs.get(f"{folder.path}/", f"{made}/", recursive=True)
        for file in (*made.rglob("*"), made):
            fsync(file)
        _rename_folder(made, copy)
    return copy


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, as far as they are missing."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for one in missing:
        fsync(one.parent)


def fsync(path: Path) -> None:
    """Have the disk hold the content of a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rename_folder(made: Path, folder: Path) -> None:
    """Rename unless there is such a folder: then that one stays, and this one is removed."""
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(made)
    fsync(folder.parent)


def _put_if_absent(file: Path, place: UPath) -> None:
    with suppress(FileExistsError):  # of a run that was killed; the folder's name tells the content
        place.fs.put_file(str(file), place.path, mode="create")


def _temporary_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")


def _remove_abandoned(folder: Path) -> None:
    """Remove what killed processes left under temporary names long ago."""
    for path in folder.glob(".*.tmp"):
        try:
            if time.time() - path.stat().st_mtime > ABANDONED_AFTER:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        except FileNotFoundError:
            pass  # another process was first
