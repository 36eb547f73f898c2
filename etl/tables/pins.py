"""Which versions of tables a run holds: they are not cleaned up before it has ended."""

import hashlib
import logging
from collections.abc import Iterator, Mapping

from pydantic import Field, ValidationError

from etl.spec.base import Strict
from etl.tables import atomic_io
from etl.tables.place import Place, listed, place, text_of

FOLDER = "_line", "pins"
log = logging.getLogger(__name__)


class Pin(Strict):
    """The versions that a run reads its tables at."""

    run: str = Field(min_length=1)
    versions: dict[str, int]


def pin(lake: str, run: str, versions: Mapping[str, int]) -> None:
    """Hold versions for a run; those that it held before are let go."""
    atomic_io.write_text(_path(lake, run), Pin(run=run, versions=dict(versions)).model_dump_json())


def unpin(lake: str, run: str) -> None:
    """Let go what a run holds, if it holds anything."""
    _path(lake, run).unlink(missing_ok=True)


def pinned(lake: str) -> list[Pin]:
    """What all runs hold; a damaged pin holds nothing, and is named in the log."""
    return list(_readable(listed(place(lake, *FOLDER), "[!.]*.json")))


def _readable(files: list[Place]) -> Iterator[Pin]:
    for file in files:
        text = text_of(file)
        try:
            if text is not None:  # else its run has just let go
                yield Pin.model_validate_json(text)
        except ValidationError:
            log.warning("%s is damaged and holds no versions any more; remove it", file)


def _path(lake: str, run: str) -> Place:
    return place(lake, *FOLDER, f"{hashlib.sha256(run.encode()).hexdigest()[:16]}.json")
