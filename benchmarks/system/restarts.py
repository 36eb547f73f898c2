"""Restarts of a training: exact resume, and startup time with a warm compiler cache.

Resume compares a training that is killed and resumed with an uninterrupted one. Startup is measured
from the end of imports to the end of the first step on a second batch size: the cold start has an
empty cache of compiled blocks, the warm start the cache of a cold run.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
import torch._dynamo
import torch._inductor.compile_fx  # otherwise imported, and timed, at the first compilation

from benchmarks.harness import ROOT, SIMULATOR_SPEC, BenchmarkResult
from benchmarks.pipelines import pipeline_paths_in, simulate_logs
from benchmarks.system.request_shape import ITEMS, SHAPE
from dags.pipeline import data_steps
from dags.runner import run_pipeline
from etl.spec import load_spec
from etl.spec.units import parse_date_range
from etl.tables.lake import Lake
from features.schema import feature_schema
from training.config import ComputeConfig, TrainConfig
from training.data.batch import Batch
from training.data.synthetic import random_batch
from training.distributed.process_group import build_mesh, process_group
from training.distributed.sharding import TorchrecTables, rowwise_adagrad_params, shard_tables
from training.model.config import SCALES
from training.model.embeddings import item_row_map_up_to, table_sizes
from training.model.gem import Gem
from training.trainer.compute import apply_compute_config
from training.trainer.step import GemModel, Loss, train_step

SIMULATOR_OVERRIDES = {
    "users": 200,
    "events_per_user_mean": 120,
    "max_events_per_user": 900,
    "days": 3,
}
DAYS, LAST_DAY = "2026-01-01:2026-01-02", "2026-01-02"
TOO_LATE = "too late, after its end"


def measure_resume(result: BenchmarkResult) -> None:
    """`resume_exact`: whether all dense weights and tables are bitwise the same.

    None if the training ended before it could be killed.
    """
    with tempfile.TemporaryDirectory() as work:
        paths = pipeline_paths_in(work)
        lake = paths.lake
        simulate_logs(Path(paths.raw), SIMULATOR_OVERRIDES)
        spec = load_spec(SIMULATOR_SPEC)
        run_pipeline(spec, paths, data_steps(spec, paths, ("--days", DAYS)))
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
    record_resume(result, is_exact, killed_at)
    equal = "equal" if is_exact else "NOT equal"
    outcome = f"{len(uninterrupted)} tensors {equal}, killed {killed_at or TOO_LATE}"
    result.rows.append(("killed and resumed", outcome, "never killed", "", "the same"))


def record_resume(result: BenchmarkResult, is_exact: bool, killed_at: str | None) -> None:
    """Record `resume_exact`, which says nothing of a training that was not killed."""
    if killed_at:
        result.figures["resume_exact"] = is_exact
    else:
        result.record("resume_exact", None, f"the training was killed {TOO_LATE}")


def start_and_kill(command: list[str], checkpoint_dir: Path) -> str | None:
    """Start a training and kill it after its first checkpoint.

    Returns when it was killed; None if it had ended before.
    """
    child = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    manifests: list[Path] = []
    while not manifests and child.poll() is None:
        time.sleep(0.01)
        manifests = list(checkpoint_dir.glob("*.partial/gem.json"))
    child.send_signal(signal.SIGKILL)
    was_killed = child.wait() == -signal.SIGKILL
    return f"after {manifests[0].parent.name}" if manifests and was_killed else None


def all_weights(root: str) -> dict[str, torch.Tensor]:
    """All tensors of the dense model and of the embedding tables."""
    from training.distributed.process_group import process_group
    from training.distributed.sharding import local_shards
    from training.trainer.trainer import load_train_state

    with process_group():
        lake = Lake(root, load_spec(SIMULATOR_SPEC))
        state, _ = load_train_state(lake, parse_date_range(LAST_DAY)[0])
        weights = {f"dense.{n}": t.clone() for n, t in state.model.core.state_dict().items()}
        for name, table in state.tables.state_dict().items():
            (_, rows), *_ = local_shards(table)
            weights[f"table.{name}"] = rows.clone()
        return weights


ROUNDS = 2
START_SCRIPT = """
import json, time
start = time.monotonic()
from benchmarks.system.restarts import train_two_steps
imported = time.monotonic()
train_two_steps()
print("SECONDS", json.dumps([imported - start, time.monotonic() - imported]))
"""


def train_two_steps() -> None:
    """Build a GEM of the default size with compiled blocks, and train on two batch sizes."""
    features, sizes = feature_schema(load_spec(SIMULATOR_SPEC)), SCALES["small"]
    batch = random_batch(features, SHAPE)
    with process_group():
        core = Gem(features, sizes)
        apply_compute_config(core, ComputeConfig(compiled=True))
        rows = table_sizes(features, ITEMS, sizes.user_hash_buckets)
        tables = shard_tables(
            TorchrecTables(rows, sizes.embedding_dim), build_mesh(1), rowwise_adagrad_params(0.05)
        )
        model = GemModel(core, core, tables, item_row_map_up_to(ITEMS), sizes.user_hash_buckets)
        optimizer = torch.optim.AdamW(core.parameters(), fused=True)
        loss = Loss.from_config(TrainConfig(), features)
        for rows_of_step in (batch, without_last_rows(batch)):
            train_step(model, rows_of_step, len(rows_of_step), optimizer, loss)


def without_last_rows(batch: Batch) -> Batch:
    """All rows except for the last of each request."""
    is_last = torch.cat((batch.request_index[1:] != batch.request_index[:-1], torch.tensor([True])))
    keep = ~is_last
    return replace(
        batch,
        request_index=batch.request_index[keep],
        surface=batch.surface[keep],
        item_index=batch.item_index[keep],
        row_categorical={name: ids[keep] for name, ids in batch.row_categorical.items()},
        row_numeric=batch.row_numeric[keep],
        row_vectors={name: vectors[keep] for name, vectors in batch.row_vectors.items()},
        context_vectors={n: vectors[keep] for n, vectors in batch.context_vectors.items()},
        labels=batch.labels[keep],
        label_mask=batch.label_mask[keep],
        outcome_values=batch.outcome_values[keep],
        extra_labels=batch.extra_labels[keep],
        extra_mask=batch.extra_mask[keep],
        impression_ids=batch.impression_ids[keep.numpy()],
        swap_weights=batch.swap_weights[keep],
    )


def measure_warm_start(result: BenchmarkResult) -> None:
    """`warm_start_ratio`, and the seconds of imports."""
    cold_runs, warm_runs = [], []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as cache:
            cold_runs.append(_time_start(Path(cache)))
            warm_runs.append(_time_start(Path(cache)))
    imports = median(seconds for seconds, _ in cold_runs + warm_runs)
    cold, warm = (median(seconds for _, seconds in runs) for runs in (cold_runs, warm_runs))
    result.record("warm_start_ratio", cold / warm, "")
    result.record("warm_start_imports_s", imports, "")
    warm_text = f"{warm:.1f} s warm; imports {imports:.1f} s"
    result.rows.append(
        ("start, compiled", warm_text, f"{cold:.1f} s cold", f"{cold / warm:.1f}", ">= 5")
    )


def _time_start(cache: Path) -> tuple[float, float]:
    """Seconds of imports and of the start, in a new process."""
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "-c", START_SCRIPT],
        env=env,
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    (line,) = (line for line in process.stdout.splitlines() if line.startswith("SECONDS"))
    imports, start = json.loads(line.removeprefix("SECONDS"))
    return imports, start
