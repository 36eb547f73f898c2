"""The local runner: the steps of the line, here and now; finished ones are skipped."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from pydantic import TypeAdapter

from dags.inputs import finished, inputs_of
from dags.line import Place, Step
from etl.errors import error_of_exit_code
from etl.spec import DataSpec, load_spec
from etl.tables import records
from etl.tables.codes import bind, read_codes

Plan = TypeAdapter(tuple[Place, list[Step]])


def run_line(spec: DataSpec, place: Place, steps: Sequence[Step]) -> None:
    """Run the steps that have not finished; neighbours of one engine share a process.

    Raises UserError where a step refuses its input, TemporaryError where it meets a temporary fault
    or is killed, else SystemExit; what finished before stays finished.
    """
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder, "plan.json")  # of this run alone
        plan.write_bytes(Plan.dump_json((place, list(steps))))
        for _, group in groupby(unfinished(spec, place, steps), key=lambda step: step.engine):
            _run_batch(plan, [step.name for step in group])


def _run_batch(plan: Path, names: Sequence[str]) -> None:
    command = [sys.executable, "-m", "gemline", "batch", "--plan", str(plan), "--steps", *names]
    code = subprocess.run(command, env=os.environ | {"PYTHONUNBUFFERED": "1"}).returncode
    if code:
        raise error_of_exit_code(
            code,
            f"the line stopped with exit code {code}; the reason is above. Run the same command "
            "again to go on from there",
        )


def unfinished(spec: DataSpec, place: Place, steps: Sequence[Step]) -> list[Step]:
    """Steps that have to run: those whose inputs changed, and all that read what they write."""
    found: list[Step] = []
    renewed: set[str] = set()
    for step in steps:
        if renewed & set(step.reads) or not finished(spec, place, steps, step):
            found.append(step)
            renewed |= set(step.writes)
    return found


def run_steps(plan: Path, names: Sequence[str]) -> int:
    """Run some steps of a plan in this process, and remember each; returns the first bad code."""
    from gemline import main

    place, steps = Plan.validate_json(plan.read_bytes())
    spec = bind(load_spec(place.spec), read_codes(place.lake))
    for step in steps:
        if step.name not in names:
            continue
        inputs = inputs_of(spec, place, steps, step)
        start = time.monotonic()
        code = main(step.command)
        if code:
            return code
        records.write(place.lake, step.name, inputs, time.monotonic() - start)
    return 0
