"""A day that GEM learns on top of the day before: what its seconds go to."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.result import Result
from dags.line import Place, data_steps
from etl.cli import read_mapping
from etl.errors import UserError
from etl.sources.simulator.config import SimulatorConfig
from etl.sources.simulator.simulate import simulate

ROOT = Path(__file__).parents[2]
SPEC = ROOT / "conf/specs/simulator.yaml"
WORLD = {"days": 2, "users": 400}
BEFORE, DAY = "2026-01-01", "2026-01-02"
SCALE = ("--scale", "base")
LEAST = 300  # seconds of learning
TOLD = re.compile(r"effective training time .*")


def measure(result: Result) -> None:
    """`effective_training_time` of an increment, by the timeline that it prints."""
    from gemline import main

    os.environ.setdefault("GEMLINE_SPARK_MASTER", "local[2]")
    with tempfile.TemporaryDirectory() as work:
        place = Place(SPEC, str(Path(work, "raw")), str(Path(work, "lake")))
        world = read_mapping(ROOT / "conf/simulator/demo.yaml") | WORLD
        simulate(SimulatorConfig(**world), Path(place.raw))
        for step in data_steps(place, ("--days", f"{BEFORE}:{DAY}")):
            if main(step.command):
                raise UserError(f"{step.name} failed; the reason is above")
        timeline = [_train(place, day) for day in (BEFORE, DAY)][-1]
    spans = {name: float(s) for name, s in re.findall(r"([a-z ]+) ([\d.]+) s", timeline)}
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
