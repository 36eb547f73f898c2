"""What a lake remembers of the line's steps: which finished, from which inputs, how fast."""

import logging
import uuid

from pydantic import ValidationError

from etl.spec.base import Strict
from etl.tables import atomic_io
from etl.tables.place import Place, listed, place, text_of

FOLDER = "_line", "steps"
log = logging.getLogger(__name__)


class Record(Strict):
    """That a step finished: from which inputs, as which run, and in how many seconds."""

    inputs: str
    run: str
    seconds: float


def read(lake: str, step: str) -> Record | None:
    """The record of a step, if it ever finished; a damaged one is named in the log."""
    text = text_of(_path(lake, step))
    try:
        return None if text is None else Record.model_validate_json(text)
    except ValidationError:
        log.warning("%s is damaged: the step %s runs again", _path(lake, step), step)
        return None


def write(lake: str, step: str, inputs: str, seconds: float) -> None:
    """Remember that a step finished, under a new run."""
    record = Record(inputs=inputs, run=uuid.uuid4().hex, seconds=seconds)
    atomic_io.write_text(_path(lake, step), record.model_dump_json())


def renew(lake: str, step: str) -> None:
    """Give a step that finished a new run, so that what reads from it runs again."""
    record = read(lake, step)
    if record:
        write(lake, step, record.inputs, record.seconds)


def seconds(lake: str) -> list[tuple[str, float]]:
    """Seconds of each finished step, in the order in which they finished."""
    paths = sorted(listed(place(lake, *FOLDER), "*.json"), key=lambda path: path.stat().st_mtime)
    found = [(path.stem, read(lake, path.stem)) for path in paths]
    return [(name, record.seconds) for name, record in found if record]


def _path(lake: str, step: str) -> Place:
    return place(lake, *FOLDER, f"{step}.json")
