"""The local runner: runs the steps of the pipeline on this machine and skips finished ones."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from pydantic import TypeAdapter

from dags.pipeline import PipelinePaths, Step
from dags.state import input_fingerprint, is_up_to_date
from etl.errors import error_from_exit_code
from etl.spec import DataSpec, load_spec
from etl.tables import step_state
from etl.tables.code_registry import assign_codes, read_codes

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
        step_state.write_step_state(paths.lake, step.name, fingerprint, time.monotonic() - start)
    return 0
