"""Exact resume: a training that is killed and resumed, compared with an uninterrupted one."""

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.harness import BenchmarkResult
from benchmarks.paths import SIMULATOR_SPEC
from benchmarks.pipelines import pipeline_paths_in, simulate_logs
from dags.pipeline import data_steps
from dags.runner import run_pipeline
from etl.spec import load_spec
from etl.spec.units import parse_date_range
from etl.tables.lake import Lake

SIMULATOR_OVERRIDES = {
    "users": 200,
    "events_per_user_mean": 120,
    "max_events_per_user": 900,
    "days": 3,
}
DAYS, LAST_DAY = "2026-01-01:2026-01-02", "2026-01-02"


def measure_resume(result: BenchmarkResult) -> None:
    """`resume_exact`: whether all dense weights and tables are bitwise the same."""
    with tempfile.TemporaryDirectory() as work:
        paths = pipeline_paths_in(work)
        lake = paths.lake
        simulate_logs(Path(paths.raw), SIMULATOR_OVERRIDES)
        run_pipeline(load_spec(SIMULATOR_SPEC), paths, data_steps(paths, ("--days", DAYS)))
        command = [
            sys.executable, "-m", "gemline", "train", "gem", *paths.cli_flags, "--days", DAYS,
            "--scale", "tiny", "--batch-rows", "64", "--checkpoint-every", "5",
        ]  # fmt: skip
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        uninterrupted = all_weights(lake)
        shutil.rmtree(Path(lake, "models"))
        killed_at = start_and_kill(command, Path(lake, "models", "gem"))
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        resumed = all_weights(lake)
    is_exact = uninterrupted.keys() == resumed.keys() and all(
        torch.equal(tensor, resumed[name]) for name, tensor in uninterrupted.items()
    )
    result.figures["resume_exact"] = is_exact
    equal = "equal" if is_exact else "NOT equal"
    outcome = f"{len(uninterrupted)} tensors {equal}, killed {killed_at}"
    result.rows.append(("killed and resumed", outcome, "never killed", "", "the same"))


def start_and_kill(command: list[str], checkpoint_dir: Path) -> str:
    """Start a training and kill it after its first checkpoint; returns when it was killed."""
    child = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    manifests: list[Path] = []
    while not manifests and child.poll() is None:
        time.sleep(0.01)
        manifests = list(checkpoint_dir.glob("*.partial/gem.json"))
    child.send_signal(signal.SIGKILL)
    child.wait()
    return f"after {manifests[0].parent.name}" if manifests else "too late"


def all_weights(root: str) -> dict[str, torch.Tensor]:
    """All tensors of the dense model and of the embedding tables."""
    from training.distributed.process_group import process_group
    from training.distributed.sparse import local_shards
    from training.trainer.trainer import load_train_state

    with process_group():
        lake = Lake(root, load_spec(SIMULATOR_SPEC))
        state, _ = load_train_state(lake, parse_date_range(LAST_DAY)[0])
        weights = {f"dense.{n}": t.clone() for n, t in state.model.core.state_dict().items()}
        for name, table in state.tables.state_dict().items():
            (_, rows), *_ = local_shards(table)
            weights[f"table.{name}"] = rows.clone()
        return weights
