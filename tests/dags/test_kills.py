"""Killing the line and starting it again gives the tables of a line that was never killed."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from dags.inputs import inputs_of
from dags.line import Place, Step, data_steps, line, newest_mature
from etl.tables import records
from etl.tables.lake import Lake
from gemline import main
from tests.pipeline import TABLES, rows
from tests.small_line import SmallLine
from tests.world import copy_of


def kill_when(command: list[str], reached: Callable[[], bool], delay: float = 0) -> None:
    """Start the line; kill it and all its children so many seconds after `reached` holds."""
    child = subprocess.Popen(
        [sys.executable, "-m", "gemline", *command], start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while not reached() and time.monotonic() < deadline:
        assert child.poll() is None, "the line ended before it was killed"
        time.sleep(0.005)
    time.sleep(delay)
    assert child.poll() is None, f"the line ended within {delay:.1f} s"
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def steps_of(small_line: SmallLine, lake: Lake) -> tuple[Place, list[Step]]:
    place = Place(small_line.spec, str(small_line.raw), lake.root)
    days = newest_mature(lake.spec, *small_line.days)
    return place, line(lake.spec, place, days, ("--scale", "tiny"))


def remember_finished(small_line: SmallLine, lake: Lake, names: list[str]) -> None:
    """Record steps as the line does when they have finished."""
    place, steps = steps_of(small_line, lake)
    for step in steps:
        if step.name in names:
            records.write(place.lake, step.name, inputs_of(lake.spec, place, steps, step), 1.0)


def check_tables(made: Lake, expected: Lake) -> None:
    for name in TABLES:
        assert rows(made, name) == rows(expected, name), name
    assert Path(made.root, "report.html").is_file()
    assert not [p for p in Path(made.root).rglob("*") if p.name.endswith(".partial")]


def test_a_line_killed_between_staging_and_commit_goes_on(
    small_line: SmallLine, small_lake: Lake, tmp_path: Path
) -> None:
    """The examples are staged when it is killed; what finished before does not run again."""
    own = copy_of(small_lake, tmp_path / "lake")
    shutil.rmtree(own.path("examples"))
    finished = ["ingest", "attributes", "labels", "items", "history"]
    remember_finished(small_line, own, finished)
    before = {step: records.read(own.root, step) for step in finished}
    command = small_line.command(Path(own.root))
    kill_when(command, lambda: any(Path(own.path("examples")).rglob("*.parquet")))
    assert records.read(own.root, "examples") is None
    assert main(command) == 0
    check_tables(own, small_lake)
    assert {step: records.read(own.root, step) for step in finished} == before


@pytest.mark.proof
def test_a_line_killed_in_every_step_makes_the_same_models(
    small_line: SmallLine, small_lake: Lake, tmp_path: Path
) -> None:
    whole, killed = (Lake(str(tmp_path / name), small_lake.spec) for name in ("whole", "killed"))
    assert main(small_line.command(Path(whole.root))) == 0
    place, steps = steps_of(small_line, killed)
    days = f"{small_line.days[0]}:{small_line.days[1]}"
    slow = {step.name for step in data_steps(place, ("--days", days))}
    delay = random.Random(0)
    for step in steps[:-1]:
        kill_when(
            small_line.command(Path(killed.root)),
            lambda name=step.name: records.read(killed.root, name) is not None,
            delay.uniform(0, 6 if step.name in slow else 0.3),  # they take seconds, others one
        )
        print(f"killed after {step.name}", flush=True)
    assert main(small_line.command(Path(killed.root))) == 0
    check_tables(killed, small_lake)
    for path in sorted(Path(whole.root, "evaluations").iterdir()):
        other = Path(killed.root, "evaluations", path.name)
        assert pq.read_table(path).equals(pq.read_table(other)), path.name
    for table in ("knowledge", "scores"):
        one, other = rows(whole, table), rows(killed, table)
        assert one and one == other, table
