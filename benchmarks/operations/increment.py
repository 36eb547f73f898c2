"""A day that GEM learns on top of the day before: what its seconds go to."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.demo import ROOT, place_in, run_here, write_logs
from benchmarks.result import Result
from dags.line import Place, data_steps

WORLD = {"days": 2, "users": 3000}
BEFORE, DAY = "2026-01-01", "2026-01-02"
SCALE = ("--scale", "base")
LEAST = 300  # seconds of learning
TOLD = re.compile(r"effective training time .*")


def measure(result: Result) -> None:
    """`effective_training_time` of an increment, by the timeline that it prints."""
    os.environ.setdefault("GEMLINE_SPARK_MASTER", "local[2]")
    with tempfile.TemporaryDirectory() as work:
        place = place_in(work)
        write_logs(Path(place.raw), WORLD)
        run_here(data_steps(place, ("--days", f"{BEFORE}:{DAY}")))
        timeline = [_train(place, day) for day in (BEFORE, DAY)][-1]
    spans = {name: float(s) for name, s in re.findall(r"([a-z][a-z ]*) ([\d.]+) s", timeline)}
    share = spans["steps"] / sum(spans.values())
    enough = spans["steps"] >= LEAST
    why = f"{spans['steps']:.0f} s of steps; {LEAST} are asked for"
    result.take("effective_training_time", share if enough else None, why)
    rest = ", ".join(f"{name} {s:.1f}" for name, s in spans.items() if name != "steps")
    result.rows.append(
        ("a day's increment", f"{spans['steps']:.0f} s of steps", rest, f"{share:.2f}", ">= 0.80")
    )


def _train(place: Place, day: str) -> str:
    command = ["train", "gem", *place.flags, "--days", day, *SCALE]
    done = subprocess.run(
        [sys.executable, "-m", "gemline", *command], cwd=ROOT, check=True, capture_output=True,
        text=True,
    )  # fmt: skip
    found = TOLD.search(done.stderr)
    assert found, done.stderr
    return found[0].partition(":")[2]
