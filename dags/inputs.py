"""What a step depends on, and whether it has finished with that."""

import hashlib
import json
from collections.abc import Sequence
from datetime import date

from dags.line import Place, Step
from etl.spec import DataSpec
from etl.spec.units import each_day, parse_days
from etl.tables import records
from etl.tables.place import Place as AnyPlace
from etl.tables.place import here, listed
from etl.tables.place import place as place_of


def finished(spec: DataSpec, place: Place, steps: Sequence[Step], step: Step) -> bool:
    """Whether a step finished with the inputs it would have now, and what it wrote is there."""
    record = records.read(place.lake, step.name)
    if record is None or record.inputs != inputs_of(spec, place, steps, step):
        return False
    return all(_place_of(place.lake, name).exists() for name in step.writes)


def _place_of(lake: str, name: str) -> AnyPlace:
    """Where a step writes: of an object store, features that answer online are each machine's."""
    there = place_of(lake, name)
    return here(there) if name.startswith("online/") else there


def inputs_of(spec: DataSpec, place: Place, steps: Sequence[Step], step: Step) -> str:
    """A hash of all that a step depends on: its command, the spec, the raw files, earlier runs."""
    runs = {}
    for other in steps:
        if set(other.writes) & set(step.reads):
            record = records.read(place.lake, other.name)
            runs[other.name] = record.run if record else None
    facts = {
        "command": step.command,
        "spec": spec.hash,
        "raw": raw_files(spec, place.raw, _days_of(step)) if "raw" in step.reads else None,
        "runs": runs,
    }
    if "raw" in step.reads:
        facts["raw read"] = spec.reading
    if step.engine == "torch":
        facts["models read"] = spec.model_dump(mode="json", include={"sequences", "match"})
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _days_of(step: Step) -> tuple[date, date]:
    return parse_days(step.command[step.command.index("--days") + 1])


def raw_files(spec: DataSpec, raw: str, days: tuple[date, date]) -> list[tuple[str, int, int]]:
    """Path, size and time of change of every raw file of some days."""
    patterns = {
        source.path.replace("{day}", str(day))
        for source in spec.sources.values()
        for day in each_day(*days)
    }
    paths = [path for pattern in sorted(patterns) for path in listed(place_of(raw), pattern)]
    return [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in paths]
