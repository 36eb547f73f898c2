"""Killing the line and starting it again gives the tables of a line that was never killed."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from dags.line import Place, data_steps, newest_mature
from dags.line import line as steps_of
from etl.tables import records
from etl.tables.lake import Lake
from gemline import main
from tests.conftest import FIRST, LAST
from tests.pipeline import TABLES, rows


def line(spec: Path, raw: Path, lake: Path) -> list[str]:
    where = ["--spec", str(spec), "--raw", str(raw), "--lake", str(lake)]
    return ["run", *where, "--days", f"{FIRST}:{LAST}", "--scale", "tiny"]


def kill_after(command: list[str], lake: Path, step: str, seconds: float) -> None:
    """Start the line; kill it and all its children a little after a step has finished."""
    child = subprocess.Popen(
        [sys.executable, "-m", "gemline", *command], start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while records.read(str(lake), step) is None and time.monotonic() < deadline:
        assert child.poll() is None, "the line ended before it was killed"
        time.sleep(0.02)
    time.sleep(seconds)
    assert child.poll() is None, f"the line ended {seconds:.1f} s after {step}"
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def check(lake: Lake, killed: Path) -> None:
    made = Lake(str(killed), lake.spec)
    for name in TABLES:
        assert rows(made, name) == rows(lake, name), name
    assert (killed / "report.html").is_file()
    assert not [p for p in killed.rglob("*") if p.name.endswith(".partial")]


def test_a_killed_line_goes_on(
    lake: Lake, spec_path: Path, raw: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "lake"
    command = line(spec_path, raw, own)
    kill_after(command, own, "examples", 10.0)
    runs = {step: records.read(str(own), step) for step in ("ingest", "labels", "examples")}
    assert main(command) == 0
    check(lake, own)
    again = {step: records.read(str(own), step) for step in runs}
    assert again == runs, "a finished step ran again"


@pytest.mark.proof
def test_a_line_killed_in_every_step_makes_the_same_models(
    lake: Lake, spec_path: Path, raw: Path, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main(line(spec_path, raw, whole)) == 0
    days = newest_mature(lake.spec, FIRST, LAST)
    place, chosen = Place(spec_path, str(raw), str(killed)), ("--days", f"{FIRST}:{LAST}")
    slow = {step.name for step in data_steps(place, chosen)}  # seconds each; the others a second
    delay = random.Random(0)
    for step in [step.name for step in steps_of(lake.spec, place, days)][:-1]:
        kill_after(
            line(spec_path, raw, killed), killed, step, delay.uniform(0, 6 if step in slow else 0.3)
        )
        print(f"killed after {step}", flush=True)
    assert main(line(spec_path, raw, killed)) == 0
    check(lake, killed)
    for path in sorted((whole / "evaluations").iterdir()):
        same(path, killed / "evaluations" / path.name)
    for table in ("knowledge", "scores"):
        one, other = (rows(Lake(str(at), lake.spec), table) for at in (whole, killed))
        assert one and one == other, table


def same(one: Path, other: Path) -> None:
    """The same rows, labels and probabilities."""
    assert pq.read_table(one).equals(pq.read_table(other)), one.name
