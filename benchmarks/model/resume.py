"""A training that is killed and started again, beside one that never stopped."""

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.demo import SPEC, place_in, write_logs
from benchmarks.result import Result
from dags.line import data_steps
from dags.local import run_line
from etl.spec import load_spec
from etl.spec.units import parse_days
from etl.tables.lake import Lake

WORLD = {"users": 200, "events_per_user_mean": 120, "max_events_per_user": 900, "days": 3}
DAYS, LAST = "2026-01-01:2026-01-02", "2026-01-02"


def measure(result: Result) -> None:
    """`resume_exact`: whether all weights and averages are the same to the last digit."""
    with tempfile.TemporaryDirectory() as work:
        place = place_in(work)
        lake = place.lake
        write_logs(Path(place.raw), WORLD)
        run_line(load_spec(SPEC), place, data_steps(place, ("--days", DAYS)))
        command = [
            sys.executable, "-m", "gemline", "train", "gem", *place.flags, "--days", DAYS,
            "--scale", "tiny", "--batch-rows", "64", "--checkpoint-every", "5",
        ]  # fmt: skip
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        whole = weights(lake)
        shutil.rmtree(Path(lake, "models"))
        killed_at = kill(command, Path(lake, "models", "gem"))
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        again = weights(lake)
    exact = whole.keys() == again.keys() and all(torch.equal(whole[n], again[n]) for n in whole)
    result.figures["resume_exact"] = exact
    told = f"{len(whole)} tensors {'equal' if exact else 'NOT equal'}, killed {killed_at}"
    result.rows.append(("killed and resumed", told, "never killed", "", "the same"))


def kill(command: list[str], models: Path) -> str:
    """Start a training and kill it behind its first checkpoint; returns how far it had come."""
    child = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while not (found := list(models.glob("*.partial/gem.json"))) and child.poll() is None:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    return f"after {found[0].parent.name}" if found else "too late"


def weights(root: str) -> dict[str, torch.Tensor]:
    """All tensors of the dense model and of the tables."""
    from training.gem import load_trained
    from training.parallel.processes import process_group
    from training.parallel.sparse import parts_of

    with process_group():
        trained, _ = load_trained(Lake(root, load_spec(SPEC)), parse_days(LAST)[0])
        core = {f"dense.{n}": t.clone() for n, t in trained.model.core.state_dict().items()}
        tables = trained.tables.state_dict().items()
        held = {name: parts_of(table)[0][1].clone() for name, table in tables}
        return core | {f"table.{name}": rows for name, rows in held.items()}
