"""What a step depends on, and whether it has finished with that."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from dags.line import Place, Step
from etl.spec import DataSpec
from etl.tables import records


def inputs_of(spec: DataSpec, place: Place, steps: Sequence[Step], step: Step) -> str:
    """A hash of all that a step depends on: its command, the spec, the raw files, earlier runs."""
    runs = {}
    for other in steps:
        if set(other.writes) & set(step.reads):
            record = records.read(place.lake, other.name)
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
    record = records.read(place.lake, step.name)
    return record is not None and record.inputs == inputs_of(spec, place, steps, step)


def raw_files(spec: DataSpec, raw: str) -> list[tuple[str, int, int]]:
    """Path, size and time of change of every raw file that the sources name."""
    if "://" in raw:
        return []
    patterns = {source.path.replace("{day}", "*") for source in spec.sources.values()}
    paths = sorted({path for pattern in patterns for path in Path(raw).glob(pattern)})
    return [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in paths]
