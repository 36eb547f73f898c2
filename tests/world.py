"""Folders that many tests share, built once for all pytest-xdist workers."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from etl.tables.lake import Lake


class World:
    """Folders by name below one root: the first worker builds a folder, the others wait."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def folder(self, name: str, build: Callable[[Path], object]) -> Path:
        """The folder `name`, built by `build` unless it exists.

        It is renamed once it is complete, so that a killed worker leaves no partial folder.
        """
        complete, partial = self.root / name, self.root / f"{name}.partial"
        with FileLock(self.root / f"{name}.lock"):
            if not complete.exists():
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                build(partial)
                partial.rename(complete)
        return complete


def copy_of(lake: Lake, folder: Path) -> Lake:
    """The same tables and models in another folder, for a test that changes them.

    Files are copied, not linked: tests damage files in place.
    """
    shutil.copytree(lake.root, folder)
    return Lake(str(folder), lake.spec)


def link_tables(lake: Lake, folder: Path) -> Lake:
    """The same tables and models by symbolic links, without the records of steps and leases."""
    for path in Path(lake.root).iterdir():
        if path.name != "_pipeline":
            (folder / path.name).symlink_to(path)
    return Lake(str(folder), lake.spec)


@contextmanager
def unchanged(root: Path) -> Iterator[None]:
    """Assert that no file below `root` is changed within the block."""
    before = _state_of(root)
    yield
    assert _state_of(root) == before, f"a test wrote to {root}, which all tests share"


def _state_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and modification time (ns) of every file below a folder."""
    stats = {path: path.stat() for path in sorted(folder.rglob("*")) if path.is_file()}
    return {str(path): (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}
