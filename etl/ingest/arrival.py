"""Arrival of raw files and Delta tables: whether a day is complete, and which files were read."""

import logging
import time
from collections.abc import Mapping
from datetime import date

from pydantic import TypeAdapter

from etl.errors import UserError
from etl.spec.file_source import fill_day
from etl.spec.model import DataSpec
from etl.spec.sources import Source
from etl.spec.units import DayRange, date_range
from etl.tables import atomic_io
from etl.tables.uri import StoragePath, list_matching, read_text_if_exists, resolve_uri

RECORD_FOLDER = "_pipeline", "raw_files"
ATTRIBUTE_FOLDER = (*RECORD_FOLDER, "attributes")
# Source name -> path below the raw folder -> size in bytes, time of the last change in ns.
FileStates = dict[str, dict[str, tuple[int, int]]]
_FILE_STATES_ADAPTER = TypeAdapter(FileStates)


def file_states(source: Source, raw: str, days: DayRange) -> dict[str, tuple[int, int]]:
    """Size and time of the last change (ns) of the files of a source that ingest reads, by path.

    Those of a range of days, or all if the source is not partitioned by day.
    """
    if source.format == "delta":
        # Imported here, so that a schedule without Delta sources needs neither Spark nor Delta.
        from etl.ingest.delta_tables import delta_file_states

        return delta_file_states(source, raw, days)
    root = resolve_uri(raw)
    patterns = {source.path_on(day) for day in date_range(*days)}
    paths = [path for pattern in sorted(patterns) for path in list_matching(root, pattern)]
    paths = [path for path in paths if _is_visible(path) and path.is_file()]
    return {str(path).removeprefix(str(root)): _size_and_mtime(path) for path in paths}


def required_daily_sources(spec: DataSpec) -> list[str]:
    """Names of the sources that must have files for every day."""
    return [
        name
        for name, source in spec.sources.items()
        if source.is_partitioned_by_day and not source.optional
    ]


def day_file_states(spec: DataSpec, raw: str, day: date) -> FileStates:
    """Size and modification time of a day's files, for the sources that are partitioned by day."""
    return _daily_file_states(spec.sources, raw, day)


def _daily_file_states(sources: Mapping[str, Source], raw: str, day: date) -> FileStates:
    return {
        name: file_states(source, raw, (day, day))
        for name, source in sources.items()
        if source.is_partitioned_by_day
    }


def file_states_by_day(
    sources: Mapping[str, Source], raw: str, days: DayRange
) -> dict[date, FileStates]:
    """The raw files of each day, of those of some sources that are partitioned by day.

    Empty for a file system that only Hadoop can list.
    """
    try:
        return {day: _daily_file_states(sources, raw, day) for day in date_range(*days)}
    except UserError as error:
        logging.warning("files that arrive late will not be detected: %s", error)
        return {}


def has_arrived(spec: DataSpec, raw: str, source_name: str, day: date) -> bool:
    """Whether a day's files of a source are complete.

    They are complete when the source's `success_file` exists in each of their folders, of which
    there must be one. For a source without such a file, they are complete if files exist and none
    has changed for `unchanged_for`.
    """
    source = spec.sources[source_name]
    if source.success_file:
        name, folders = fill_day(source.success_file, day), _folders(source, raw, day)
        return bool(folders) and all((folder / name).exists() for folder in folders)
    files = file_states(source, raw, (day, day))
    if not files:
        return False
    last_change = max(mtime for _, mtime in files.values())
    return time.time_ns() - last_change >= source.unchanged_for * 1_000_000_000


def _folders(source: Source, raw: str, day: date) -> list[StoragePath]:
    """The folders of a day's files, such as one of each hour."""
    root, pattern = resolve_uri(raw), fill_day(source.location.rpartition("/")[0], day)
    if not pattern:
        return [root]
    return [path for path in list_matching(root, pattern) if _is_visible(path) and path.is_dir()]


def _is_visible(path: StoragePath) -> bool:
    """Whether ingest reads a file: names of hidden or temporary ones begin with `.` or `_`."""
    return path.name[0] not in "._"


def record_ingested_files(lake: str, states_by_day: Mapping[date, FileStates]) -> None:
    """Record the raw files that an ingest has read, by day."""
    for day, files in states_by_day.items():
        _write_record(lake, RECORD_FOLDER, day, files)


def record_attribute_files(lake: str, states_by_day: Mapping[date, FileStates]) -> None:
    """Record the files of attributes that were read before the ingest of their days."""
    for day, files in states_by_day.items():
        _write_record(lake, ATTRIBUTE_FOLDER, day, files)


def with_attribute_files(
    lake: str, states_by_day: Mapping[date, FileStates]
) -> dict[date, FileStates]:
    """Raw files by day, those of attributes as they were when `record_attribute_files` was called.

    They may have changed between the step that read them and ingest.
    """
    states = {}
    for day, files in states_by_day.items():
        read_before = _read_record(lake, ATTRIBUTE_FOLDER, day) or {}
        states[day] = files | {name: read_before[name] for name in files if name in read_before}
    return states


def ingested_file_states(lake: str, day: date) -> FileStates | None:
    """The files that the last ingest of a day has read; None without a record of one."""
    return _read_record(lake, RECORD_FOLDER, day)


def _write_record(lake: str, folder: tuple[str, ...], day: date, files: FileStates) -> None:
    text = _FILE_STATES_ADAPTER.dump_json(files).decode()
    atomic_io.write_text(resolve_uri(lake, *folder, f"{day}.json"), text)


def _read_record(lake: str, folder: tuple[str, ...], day: date) -> FileStates | None:
    text = read_text_if_exists(resolve_uri(lake, *folder, f"{day}.json"))
    return None if text is None else _FILE_STATES_ADAPTER.validate_json(text)


def _size_and_mtime(path: StoragePath) -> tuple[int, int]:
    """Size and time of the last change, including the move of a local file into place (ctime)."""
    stat = path.stat()
    return stat.st_size, max(stat.st_mtime_ns, getattr(stat, "st_ctime_ns", 0))
