"""State of pipeline runs in a lake: finished steps with their inputs, and pinned table versions.

A step whose inputs have not changed since it finished is skipped. Table versions that a run has
pinned are not vacuumed until the run unpins them.
"""

import hashlib
import logging
import uuid
from collections.abc import Iterator, Mapping

from pydantic import Field, ValidationError

from etl.spec.base import StrictModel
from etl.tables import atomic_io
from etl.tables.uri import StoragePath, list_matching, read_text_if_exists, resolve_uri

STEPS_FOLDER = "_pipeline", "steps"
PINS_FOLDER = "_pipeline", "pins"
REFRESH_PREFIX = "refresh-"  # of the names of the steps of a refresh
log = logging.getLogger(__name__)


class StepState(StrictModel):
    """The last run of a step that finished."""

    input_fingerprint: str
    """Fingerprint of what the step read."""
    run_id: str
    """Id of the run; steps that read the output run again when it changes."""
    seconds: float
    """Duration of the run."""


def read_step_state(lake: str, step: str) -> StepState | None:
    """The state of a step, None if it never finished; a damaged file is logged and ignored."""
    text = read_text_if_exists(_step_state_path(lake, step))
    try:
        return None if text is None else StepState.model_validate_json(text)
    except ValidationError:
        log.warning("%s is damaged: the step %s runs again", _step_state_path(lake, step), step)
        return None


def write_step_state(lake: str, step: str, input_fingerprint: str, seconds: float) -> None:
    """Record that a step finished, with a new run id."""
    state = StepState(input_fingerprint=input_fingerprint, run_id=uuid.uuid4().hex, seconds=seconds)
    atomic_io.write_text(_step_state_path(lake, step), state.model_dump_json())


def renew_run_id(lake: str, step: str) -> None:
    """Give a finished step a new run id, so that the steps that read its output run again."""
    state = read_step_state(lake, step)
    if state:
        write_step_state(lake, step, state.input_fingerprint, state.seconds)


def step_durations(lake: str) -> list[tuple[str, float]]:
    """Name and seconds of each finished step, in the order in which they finished."""
    paths = sorted(
        list_matching(resolve_uri(lake, *STEPS_FOLDER), "*.json"),
        key=lambda path: path.stat().st_mtime,
    )
    states = [(path.stem, read_step_state(lake, path.stem)) for path in paths]
    return [(name, state.seconds) for name, state in states if state]


def _step_state_path(lake: str, step: str) -> StoragePath:
    return resolve_uri(lake, *STEPS_FOLDER, f"{step}.json")


class Pin(StrictModel):
    """The table versions that one run has pinned."""

    run_id: str = Field(min_length=1)
    """Id of the run."""
    versions: dict[str, int]
    """Version by table."""


def pin_versions(lake: str, run_id: str, versions: Mapping[str, int]) -> None:
    """Pin table versions for a run, in place of those that it pinned before."""
    atomic_io.write_text(
        _pin_path(lake, run_id), Pin(run_id=run_id, versions=dict(versions)).model_dump_json()
    )


def unpin_versions(lake: str, run_id: str) -> None:
    """Remove the pin of a run, if it has one."""
    _pin_path(lake, run_id).unlink(missing_ok=True)


def read_pins(lake: str) -> list[Pin]:
    """The pins of all runs; damaged files are skipped and logged."""
    return list(_read_valid_pins(list_matching(resolve_uri(lake, *PINS_FOLDER), "[!.]*.json")))


def _read_valid_pins(files: list[StoragePath]) -> Iterator[Pin]:
    for file in files:
        text = read_text_if_exists(file)
        try:
            if text is not None:  # otherwise the run has just unpinned
                yield Pin.model_validate_json(text)
        except ValidationError:
            log.warning("%s is damaged and no longer pins any versions; remove it", file)


def _pin_path(lake: str, run_id: str) -> StoragePath:
    name = hashlib.sha256(run_id.encode()).hexdigest()[:16]  # run ids may contain slashes
    return resolve_uri(lake, *PINS_FOLDER, f"{name}.json")
