"""Startup time of a training with compiled blocks, with a cold and a warm compiler cache.

Measured from the end of imports to the end of the first step on a second batch size. The cold start
has an empty cache, the warm start the cache of a cold run.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
import torch._dynamo
import torch._inductor.compile_fx  # otherwise imported, and timed, at the first compilation

from benchmarks.harness import BenchmarkResult
from benchmarks.paths import ROOT, SIMULATOR_SPEC
from benchmarks.system.request_shape import ITEMS, random_batch
from etl.spec import load_spec
from features.schema import feature_schema
from training.config import ComputeConfig, TrainConfig
from training.data.batch import Batch
from training.distributed.process_group import build_mesh, process_group
from training.distributed.sparse import TorchrecTables, rowwise_adagrad_params, shard_tables
from training.model.config import SCALES
from training.model.embeddings import item_row_map_up_to, table_sizes
from training.model.gem import Gem
from training.trainer.compute import apply_compute_config
from training.trainer.step import GemModel, Loss, train_step

ROUNDS = 2
START_SCRIPT = """
import json, time
start = time.monotonic()
from benchmarks.system.warm_start import train_two_steps
imported = time.monotonic()
train_two_steps()
print("SECONDS", json.dumps([imported - start, time.monotonic() - imported]))
"""


def train_two_steps() -> None:
    """Build a GEM of the default size with compiled blocks, and train on two batch sizes."""
    features, sizes = feature_schema(load_spec(SIMULATOR_SPEC)), SCALES["small"]
    batch = random_batch(features)
    with process_group():
        core = Gem(features, sizes)
        apply_compute_config(core, ComputeConfig(compiled=True))
        rows = table_sizes(features, ITEMS, sizes.user_hash_buckets)
        tables = shard_tables(
            TorchrecTables(rows, sizes.embedding_dim), build_mesh(1), rowwise_adagrad_params(0.05)
        )
        model = GemModel(
            core, core, tables, item_row_map_up_to(ITEMS), sizes.user_hash_buckets, 0.0
        )
        optimizer = torch.optim.AdamW(core.parameters(), fused=True)
        loss = Loss.from_config(TrainConfig(), features.objectives)
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
        labels=batch.labels[keep],
        label_mask=batch.label_mask[keep],
        outcome_values=batch.outcome_values[keep],
        impression_ids=batch.impression_ids[keep.numpy()],
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
