"""Files of raw sources by day: whether a day's have arrived, and which an ingest has read."""

import time
from collections.abc import Mapping
from datetime import date

from pydantic import TypeAdapter

from etl.spec.model import DataSpec
from etl.spec.sources import Source
from etl.tables import atomic_io
from etl.tables.place import Place, listed, place, text_of

FOLDER = "_line", "raw_files"
# Of each source, by path below the raw folder: size in bytes, and time of the last change in ns.
Files = dict[str, dict[str, tuple[int, int]]]
_FILES = TypeAdapter(Files)


def daily_sources(spec: DataSpec) -> list[str]:
    """The sources that have files of their own for each day, and may not lack them."""
    return [name for name, source in spec.sources.items() if source.is_by_day and not source.sparse]


def files_of_day(spec: DataSpec, raw: str, day: date) -> Files:
    """The files of a day of all sources that have files by day."""
    root = place(raw)
    by_day = {name: source for name, source in spec.sources.items() if source.is_by_day}
    return {name: _files(root, source, day) for name, source in by_day.items()}


def has_arrived(spec: DataSpec, raw: str, name: str, day: date) -> bool:
    """Whether a day's files of a source are complete.

    They are when the marker `complete` lies beside them; without one, when there are files, and
    none has changed for `unchanged_for`.
    """
    source, root = spec.sources[name], place(raw)
    if source.complete:
        folder = source.path.rpartition("/")[0]
        marker = f"{folder}/{source.complete}" if folder else source.complete
        return (root / marker.replace("{day}", str(day))).exists()
    files = _files(root, source, day)
    changed = max((changed for _, changed in files.values()), default=None)
    return changed is not None and time.time_ns() - changed >= source.unchanged_for * 1_000_000_000


def record_files(lake: str, read: Mapping[date, Files]) -> None:
    """Record the files that an ingest of some days has read."""
    for day, files in read.items():
        atomic_io.write_text(_path(lake, day), _FILES.dump_json(files).decode())


def recorded_files(lake: str, day: date) -> Files | None:
    """The files that the last ingest of a day has read; None where none is known."""
    text = text_of(_path(lake, day))
    return None if text is None else _FILES.validate_json(text)


def _path(lake: str, day: date) -> Place:
    return place(lake, *FOLDER, f"{day}.json")


def _files(root: Place, source: Source, day: date) -> dict[str, tuple[int, int]]:
    paths = listed(root, source.path.replace("{day}", str(day)))
    return {str(path).removeprefix(str(root)): _state(path) for path in paths}


def _state(path: Place) -> tuple[int, int]:
    """Size, and time of the last change; to move a file there on a disk is a change."""
    stat = path.stat()
    return stat.st_size, max(stat.st_mtime_ns, getattr(stat, "st_ctime_ns", 0))
