"""Which steps are up to date: a fingerprint of a step's inputs is stored when it finishes."""

import hashlib
import json
from collections.abc import Collection, Sequence
from datetime import date

from dags.pipeline import PipelinePaths, Step
from etl.spec import DataSpec
from etl.spec.units import date_range, parse_date_range
from etl.tables import step_state
from etl.tables.uri import StoragePath, list_matching, local_cache_path, resolve_uri


def is_up_to_date(spec: DataSpec, paths: PipelinePaths, steps: Sequence[Step], step: Step) -> bool:
    """Whether a step finished with its current inputs, and its outputs exist."""
    record = step_state.read_step_state(paths.lake, step.name)
    if record is None or record.input_fingerprint != input_fingerprint(spec, paths, steps, step):
        return False
    return all(_output_path(paths.lake, name).exists() for name in step.writes)


def _output_path(lake: str, name: str) -> StoragePath:
    """The path a step writes; each machine has its own copy of an object store's feature store."""
    path = resolve_uri(lake, name)
    return local_cache_path(path) if name.startswith("feature_store/") else path


def input_fingerprint(
    spec: DataSpec, paths: PipelinePaths, steps: Sequence[Step], step: Step
) -> str:
    """A hash of the inputs of a step: its command, the spec, the raw files, earlier runs."""
    run_ids = {}
    for other in steps:
        if set(other.writes) & set(step.reads):
            record = step_state.read_step_state(paths.lake, other.name)
            run_ids[other.name] = record.run_id if record else None
    facts = {
        "command": step.command,
        "spec": spec.hash,
        "raw": raw_file_stats(spec, paths.raw, _step_days(step)) if "raw" in step.reads else None,
        "runs": run_ids,
    }
    if "raw" in step.reads:
        facts["raw read"] = spec.ingest_settings
    if step.engine == "torch":
        facts["models read"] = spec.model_dump(
            mode="json", include={"sequences", "similarity_attributes"}
        )
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _step_days(step: Step) -> tuple[date, date]:
    return parse_date_range(step.command[step.command.index("--days") + 1])


def raw_file_stats(spec: DataSpec, raw: str, days: tuple[date, date]) -> list[tuple[str, int, int]]:
    """Path, size and modification time (ns) of every raw file of some days."""
    patterns = {
        source.path_on(day) for source in spec.sources.values() for day in date_range(*days)
    }
    root = resolve_uri(raw)
    files = [file for pattern in sorted(patterns) for file in list_matching(root, pattern)]
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def carry_over_step_states(
    spec: DataSpec, paths: PipelinePaths, steps: Sequence[Step], kept_tables: Collection[str]
) -> list[str]:
    """Record steps whose tables were all kept as finished under a new spec; returns their names."""
    names = []
    for step in steps:
        record = step_state.read_step_state(paths.lake, step.name)
        if record and set(step.writes) <= set(kept_tables):
            fingerprint = input_fingerprint(spec, paths, steps, step)
            step_state.write_step_state(paths.lake, step.name, fingerprint, record.seconds)
            names.append(step.name)
    return names
