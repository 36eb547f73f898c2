"""What the local runner remembers: which step finished, from which inputs."""

import hashlib
import json
import uuid
from collections.abc import Sequence
from pathlib import Path

from dags.line import Place, Step
from etl.spec import DataSpec
from etl.spec.base import Strict

FOLDER = "_line"


class Record(Strict):
    """That a step finished: from which inputs, as which run, and in how many seconds."""

    inputs: str
    run: str
    seconds: float


def read(lake: str, step: str) -> Record | None:
    """The record of a step, if it ever finished."""
    path = Path(lake, FOLDER, f"{step}.json")
    return Record.model_validate_json(path.read_text()) if path.is_file() else None


def write(lake: str, step: str, inputs: str, seconds: float) -> None:
    """Remember that a step finished, under a new run."""
    path = Path(lake, FOLDER, f"{step}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}")
    record = Record(inputs=inputs, run=uuid.uuid4().hex, seconds=seconds)
    beside.write_text(record.model_dump_json())
    beside.replace(path)


def inputs_of(spec: DataSpec, place: Place, steps: Sequence[Step], step: Step) -> str:
    """A hash of all that a step depends on: its command, the spec, the raw files, earlier runs."""
    runs = {}
    for other in steps:
        if set(other.writes) & set(step.reads):
            record = read(place.lake, other.name)
            runs[other.name] = record.run if record else None
    facts = {
        "command": step.command,
        "spec": spec.model_dump(mode="json"),
        "raw": raw_files(spec, place.raw) if "raw" in step.reads else None,
        "runs": runs,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def finished(spec: DataSpec, place: Place, steps: Sequence[Step], step: Step) -> bool:
    """Whether a step has finished with the inputs that it would have now."""
    record = read(place.lake, step.name)
    return record is not None and record.inputs == inputs_of(spec, place, steps, step)


def raw_files(spec: DataSpec, raw: str) -> list[tuple[str, int, int]]:
    """Path, size and time of change of every raw file that the sources name."""
    if "://" in raw:
        return []
    patterns = {source.path.replace("{day}", "*") for source in spec.sources.values()}
    paths = sorted({path for pattern in patterns for path in Path(raw).glob(pattern)})
    return [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in paths]
