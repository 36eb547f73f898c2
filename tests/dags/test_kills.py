"""Killing the line and starting it again gives the tables of a line that was never killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dags import records
from etl.tables.lake import Lake
from gemline import main
from tests.conftest import FIRST, LAST
from tests.pipeline import rows

TABLES = ("events", "quarantine", "items", "history", "examples", "impressions")
STEPS = ("ingest", "attributes", "labels", "items", "history", "examples", "gem", "knowledge",
         "evaluate", "baseline", "ranker-feed", "scores-feed", "ranker-reels")  # fmt: skip


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
    kill_after(command, own, "labels", 1.0)
    kill_after(command, own, "examples", 14.0)
    runs = {step: records.read(str(own), step) for step in ("ingest", "labels", "examples")}
    assert main(command) == 0
    check(lake, own)
    again = {step: records.read(str(own), step) for step in runs}
    assert again == runs, "a finished step ran again"


@pytest.mark.proof
def test_a_line_killed_at_every_step_goes_on(
    lake: Lake, spec_path: Path, raw: Path, tmp_path: Path
) -> None:
    own = tmp_path / "lake"
    command = line(spec_path, raw, own)
    for step in STEPS:
        kill_after(command, own, step, 0.7)
    assert main(command) == 0
    check(lake, own)
