"""Which versions of tables a run holds: they are not cleaned up before it has ended."""

import hashlib
from collections.abc import Mapping

from pydantic import Field

from etl.spec.base import Strict
from etl.tables import whole
from etl.tables.place import Place, listed, place

FOLDER = "_line", "pins"


class Pin(Strict):
    """The versions that a run reads its tables at."""

    run: str = Field(min_length=1)
    versions: dict[str, int]


def pin(lake: str, run: str, versions: Mapping[str, int]) -> None:
    """Hold versions for a run; those that it held before are let go."""
    with whole.file(_path(lake, run)) as beside:
        beside.write_text(Pin(run=run, versions=dict(versions)).model_dump_json())


def unpin(lake: str, run: str) -> None:
    """Let go what a run holds, if it holds anything."""
    _path(lake, run).unlink(missing_ok=True)


def pinned(lake: str) -> list[Pin]:
    """What all runs hold."""
    files = listed(place(lake, *FOLDER), "[!.]*.json")
    return [Pin.model_validate_json(file.read_text()) for file in files]


def _path(lake: str, run: str) -> Place:
    return place(lake, *FOLDER, f"{hashlib.sha256(run.encode()).hexdigest()[:16]}.json")
