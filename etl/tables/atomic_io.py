"""Atomic writes: a file or folder is complete or absent, also after a crash or a power loss.

On a disk, data is written under a temporary name, fsynced and renamed, and the parent folder is
fsynced. An object store writes single files atomically but folders file by file: readers must use
a folder only once a file that is written last, such as a pointer or manifest, names it.
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

from etl.tables.uri import StoragePath, local_cache_path

STALE_AFTER_SECONDS = 24 * 3600  # the writer of an older temporary file was killed


@contextmanager
def replace_file(path: StoragePath) -> Iterator[Path]:
    """Yield a temporary path that replaces the file when the block ends without an error.

    A local copy of the earlier content of a file in the object store is removed.
    """
    temporary = _temporary_path(local_cache_path(path))
    make_folder(temporary.parent)
    try:
        yield temporary
        if isinstance(path, Path):
            fsync(temporary)
            temporary.replace(path)
            fsync(path.parent)
        else:
            path.fs.put_file(str(temporary), path.path)
            local_cache_path(path).unlink(missing_ok=True)
    finally:
        temporary.unlink(missing_ok=True)
    _remove_stale_temporaries(temporary.parent)


def write_text(path: StoragePath, text: str) -> None:
    """Write a text file atomically."""
    with replace_file(path) as temporary:
        temporary.write_text(text)


def create_if_absent(path: StoragePath, text: str) -> bool:
    """Write a file unless it exists; returns whether it was written."""
    try:
        if isinstance(path, Path):
            _create_by_link(path, text)
        else:
            path.fs.pipe_file(path.path, text.encode(), mode="create")
    except FileExistsError:
        return False
    return True


def _create_by_link(path: Path, text: str) -> None:
    """Write a file under another name and link it; raises FileExistsError if `path` exists."""
    temporary = _temporary_path(path)
    make_folder(path.parent)
    try:
        temporary.write_text(text)
        fsync(temporary)
        os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync(path.parent)


def staging_folder(path: StoragePath) -> Path:
    """A new empty local folder, to be filled and passed to `publish_folder`."""
    staging = _temporary_path(local_cache_path(path))
    make_folder(staging)
    return staging


def publish_folder(staging: Path, destination: StoragePath) -> None:
    """Move a staging folder to its destination, unless the destination exists.

    The name of the destination must be new, or a digest of the content.
    """
    for file in sorted(staging.rglob("*")):
        fsync(file)
        if not isinstance(destination, Path) and file.is_file():
            _put_if_absent(file, destination / file.relative_to(staging).as_posix())
    fsync(staging)
    _rename_folder(staging, local_cache_path(destination))


def remove_folder(folder: StoragePath) -> None:
    """Remove a folder and its local copy, if they exist."""
    if not isinstance(folder, Path) and folder.exists():
        folder.rmdir(recursive=True)
    local = local_cache_path(folder)
    if local.exists():
        removed = _temporary_path(local)
        local.rename(removed)  # an interrupted removal leaves no incomplete folder of this name
        shutil.rmtree(removed)


def download(file: StoragePath) -> Path:
    """A local path of a file: the file itself, or a new copy of it from the object store."""
    if isinstance(file, Path):
        return file
    copy = local_cache_path(file)
    temporary = _temporary_path(copy)
    make_folder(copy.parent)
    file.fs.get_file(file.path, str(temporary))
    temporary.replace(copy)
    return copy


def local_path(folder: StoragePath) -> Path:
    """A local path of a folder: the folder itself, or a copy of it that is downloaded once.

    The content of the folder must never change. The path of a missing folder does not exist.
    """
    copy = local_cache_path(folder)
    if isinstance(folder, Path) or copy.is_dir() or not folder.is_dir():
        return copy
    make_folder(copy.parent)
    with tempfile.TemporaryDirectory(dir=copy.parent) as temporary:
        downloaded = Path(temporary, "copy")
        folder.fs.get(f"{folder.path}/", f"{downloaded}/", recursive=True)
        for path in (*downloaded.rglob("*"), downloaded):
            fsync(path)
        _rename_folder(downloaded, copy)
    return copy


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents, and fsync their names."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        fsync(path.parent)


def fsync(path: Path) -> None:
    """Flush the content of a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rename_folder(source: Path, destination: Path) -> None:
    """Rename a folder; if the destination exists it stays, and the source is removed."""
    try:
        source.rename(destination)
    except OSError:
        if not destination.is_dir():
            raise
        shutil.rmtree(source)
    fsync(destination.parent)


def _put_if_absent(file: Path, destination: UPath) -> None:
    with suppress(FileExistsError):  # of a killed run; the folder's name identifies the content
        destination.fs.put_file(str(file), destination.path, mode="create")


def _temporary_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")


def _remove_stale_temporaries(folder: Path) -> None:
    """Remove temporary files and folders that killed processes left behind."""
    for path in folder.glob(".*.tmp"):
        try:
            if time.time() - path.stat().st_mtime > STALE_AFTER_SECONDS:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        except FileNotFoundError:
            pass  # another process was first
