"""The local runner: runs the steps of the pipeline on this machine and skips finished ones.

A fingerprint of a step's inputs is stored when it finishes; an unchanged one is up to date.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from itertools import groupby
from pathlib import Path

from pydantic import TypeAdapter

from dags.steps import RAW_SOURCE_KINDS, PipelinePaths, Step
from etl.errors import error_from_exit_code
from etl.ingest.arrival import FileStates, file_states
from etl.spec import DataSpec, load_spec
from etl.spec.units import DayRange, parse_date_range
from etl.tables import step_state
from etl.tables.code_registry import assign_codes, read_codes
from etl.tables.uri import StoragePath, local_cache_path, resolve_uri


def is_up_to_date(spec: DataSpec, paths: PipelinePaths, steps: Sequence[Step], step: Step) -> bool:
    """Whether a step finished with its current inputs, and its outputs exist."""
    record = step_state.read_step_state(paths.lake, step.recorded_name)
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
    """A hash of the inputs of a step: its command, the spec, its raw files, earlier runs."""
    run_ids = {}
    for other in steps:
        if set(other.writes) & set(step.reads):
            record = step_state.read_step_state(paths.lake, other.recorded_name)
            run_ids[other.name] = record.run_id if record else None
    facts: dict[str, object] = {
        "command": step.command,
        "spec": spec.hash,
        "raw": None,
        "runs": run_ids,
    }
    if "raw" in step.reads:
        kinds = RAW_SOURCE_KINDS[step.name]
        facts["raw"] = raw_file_states(spec, paths.raw, kinds, _step_days(step))
        facts["raw read"] = spec.ingest_settings
    if step.engine == "torch":
        facts["models read"] = spec.model_dump(
            mode="json", include={"sequences", "similarity_attributes", "position_bias"}
        )
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _step_days(step: Step) -> DayRange:
    return parse_date_range(step.command[step.command.index("--days") + 1])


def raw_file_states(spec: DataSpec, raw: str, kinds: Collection[str], days: DayRange) -> FileStates:
    """The raw files of the sources of some kinds on some days."""
    return {
        name: file_states(source, raw, days)
        for name, source in spec.sources.items()
        if source.kind in kinds
    }


def carry_over_step_states(
    spec: DataSpec,
    paths: PipelinePaths,
    steps: Sequence[Step],
    finished: Collection[str],
    kept_tables: Collection[str],
) -> None:
    """Record steps whose tables were all kept as finished under a new spec.

    `finished` names the steps that were up to date under the old spec. Those that read what is
    rebuilt run again nevertheless: see `pending_steps`.
    """
    for step in steps:
        record = step_state.read_step_state(paths.lake, step.recorded_name)
        if record and step.name in finished and set(step.writes) <= set(kept_tables):
            fingerprint = input_fingerprint(spec, paths, steps, step)
            seconds = record.seconds
            step_state.write_step_state(paths.lake, step.recorded_name, fingerprint, seconds)


PLAN_ADAPTER = TypeAdapter(tuple[PipelinePaths, list[Step]])


def run_pipeline(spec: DataSpec, paths: PipelinePaths, steps: Sequence[Step]) -> None:
    """Run the steps that are pending; consecutive steps of one engine share a process.

    Steps that finished before an error stay finished.

    Raises:
        UserError: A step refused its input.
        TemporaryError: A step failed temporarily, or was killed.
        SystemExit: A step failed for another reason.
    """
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder, "plan.json")
        plan.write_bytes(PLAN_ADAPTER.dump_json((paths, list(steps))))
        for _, group in groupby(pending_steps(spec, paths, steps), key=lambda step: step.engine):
            _run_batch(plan, [step.name for step in group])


def _run_batch(plan: Path, names: Sequence[str]) -> None:
    command = [sys.executable, "-m", "gemline", "batch", "--plan", str(plan), "--steps", *names]
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    code = subprocess.run(command, env=env, check=False).returncode
    if code:
        raise error_from_exit_code(
            code,
            f"the pipeline stopped with exit code {code}; the reason is above. Run the same "
            "command again to continue from there",
        )


def pending_steps(spec: DataSpec, paths: PipelinePaths, steps: Sequence[Step]) -> list[Step]:
    """Steps that have to run: those whose inputs changed, and all that read their outputs."""
    pending: list[Step] = []
    rewritten: set[str] = set()
    for step in steps:
        if rewritten & set(step.reads) or not is_up_to_date(spec, paths, steps, step):
            pending.append(step)
            rewritten |= set(step.writes)
    return pending


def run_steps(plan: Path, names: Sequence[str]) -> int:
    """Run some steps of a plan in this process and record their state.

    Returns the exit code of the first step that failed, or 0.
    """
    from gemline import main

    paths, steps = PLAN_ADAPTER.validate_json(plan.read_bytes())
    spec = assign_codes(load_spec(paths.spec), read_codes(paths.lake))
    for step in steps:
        if step.name not in names:
            continue
        fingerprint = input_fingerprint(spec, paths, steps, step)
        start = time.monotonic()
        code = main(step.command)
        if code:
            return code
        seconds = time.monotonic() - start
        step_state.write_step_state(paths.lake, step.recorded_name, fingerprint, seconds)
    return 0
