"""Elastic training: it resumes with fewer or more processes, and trains on each row once."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from etl.errors import TemporaryError
from etl.tables.lake import Lake
from features.schema import ITEM_TABLE, FeatureSchema, feature_schema
from gemline import main
from tests.conftest import FIRST
from tests.training.many import run, some_batches
from training.config import ParallelismConfig, TrainConfig
from training.data.batch import Batch
from training.distributed.process_group import process_group
from training.distributed.sharding import local_shards
from training.model.embeddings import table_sizes
from training.trainer import checkpoint
from training.trainer.async_checkpoint import AsyncCheckpointer
from training.trainer.nan_guard import non_finite_loss_error
from training.trainer.resume import DayBatches
from training.trainer.state import Manifest, TrainState, build_train_state
from training.trainer.step import Loss, NonFiniteLossError, train_step
from training.trainer.trainer import load_train_state

SIZES = ["--scale", "tiny", "--batch-rows", "24", "--checkpoint-every", "5"]
CONFIG = TrainConfig(scale="tiny", item_table_rows=128)
FULL_STATE = StateDictOptions(full_state_dict=True)
CHECKPOINT_KB = 34_400  # of this model
SAVED_BY = 4, ParallelismConfig(table_replicas=2, dense_parallelism="fsdp")
LOADED_BY = {
    "by rows, dense sharded": (2, ParallelismConfig(row_wise=True, dense_parallelism="fsdp")),
    "alone": (1, ParallelismConfig()),
}


def new_manifest(lake: Lake, world: int) -> Manifest:
    return Manifest(
        spec_hash=lake.spec.hash,
        features=feature_schema(lake.spec),
        attributes=lake.spec.attributes,
        event_types=(),
        training=CONFIG,
        num_shards=world,
        table_versions={},
        trained_from=FIRST,
        trained_until=FIRST,
        complete=False,
        batches=0,
        steps=0,
    )


def full_state(state: TrainState) -> dict[str, Any]:
    """All state that the next step depends on, gathered from all processes."""
    core, sizes = state.model.core, CONFIG.gem_config
    rows = table_sizes(core.features, CONFIG.item_table_rows, sizes.user_hash_buckets)
    with torch.no_grad():
        tables = state.tables({name: torch.arange(count) for name, count in rows.items()})
    table_states = {}
    local_states = state.tables.fused_optimizer.state_dict()["state"]
    for name, count in rows.items():
        full = torch.zeros(count)
        for value in local_states.get(f"collection.embeddings.{name}.weight", {}).values():
            for first, shard in local_shards(value):
                full[first : first + len(shard)] = shard
        dist.all_reduce(full, dist.ReduceOp.MAX)
        table_states[name] = full
    return {
        "tables": {name: table.clone() for name, table in tables.items()},
        "table_states": table_states,
        "dense": get_model_state_dict(core, options=FULL_STATE),
        "ema": get_model_state_dict(state.ema.module, options=FULL_STATE),
        "moments": get_optimizer_state_dict(core, state.optimizer, options=FULL_STATE)["state"],
        "last_access": state.last_access.last_days,
        "item_rows": state.item_rows.state_dict(),
    }


def new_state(manifest: Manifest, parallelism: ParallelismConfig) -> TrainState:
    state = build_train_state(manifest, parallelism)
    no_rows = torch.zeros(0, dtype=torch.int64)
    last_days = state.last_access.last_days[ITEM_TABLE]
    state.item_rows.update(torch.arange(100), last_days, no_rows, 0)
    return state


def step(number: int, state: TrainState, batches: list[Batch], features: FeatureSchema) -> None:
    loss = Loss.from_config(CONFIG, features)
    batch = batches[dist.get_rank()]
    train_step(state.model, batch, len(batch), state.optimizer, loss)
    state.ema.update_parameters(state.model.core)
    state.replicas.after_step(number)


def train_and_save(
    rank: int,
    features: FeatureSchema,
    batches: list[list[Batch]],
    manifest: Manifest,
    folder: str,
) -> None:
    world, parallelism = SAVED_BY
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=world)
    torch.set_num_threads(1)
    state = new_state(manifest, parallelism)
    checkpointer = AsyncCheckpointer()
    step(1, state, batches[0], features)
    step(2, state, batches[1], features)
    checkpointer.save(Path(folder, "checkpoint"), state)
    saved = deepcopy(full_state(state))
    step(3, state, batches[2], features)  # while the checkpoint is being written
    checkpointer.wait()
    if rank == 0:
        torch.save(saved, f"{folder}/saved.pt")
    dist.destroy_process_group()


def load(rank: int, features: FeatureSchema, name: str, manifest: Manifest, folder: str) -> None:
    world, parallelism = LOADED_BY[name]
    store = f"file://{folder}/store-{name.replace(' ', '-')}"
    dist.init_process_group("gloo", store, rank=rank, world_size=world)
    state = new_state(manifest, parallelism)
    checkpoint.load_checkpoint(Path(folder, "checkpoint"), state)
    loaded = full_state(state)
    if rank == 0:
        torch.save(loaded, f"{folder}/{name}.pt")
    dist.destroy_process_group()


def test_a_checkpoint_holds_one_step_and_any_number_of_processes_loads_it(
    lake: Lake, tmp_path: Path
) -> None:
    features, all_batches = some_batches(lake, 12)
    batches = [all_batches[4 * n : 4 * (n + 1)] for n in range(3)]
    processes, _ = SAVED_BY
    manifest = new_manifest(lake, processes)
    run(train_and_save, (features, batches, manifest, str(tmp_path)), processes)
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    assert all(rows.any() for rows in saved["table_states"].values())
    for name, (world, _) in LOADED_BY.items():
        run(load, (features, name, manifest, str(tmp_path)), world)
        loaded = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        torch.testing.assert_close(loaded, saved, rtol=0, atol=0, msg=name)


def test_clean_removes_old_checkpoints_and_no_other(
    lake: Lake, spec_path: Path, tmp_path: Path
) -> None:
    days = [FIRST + timedelta(days=n) for n in range(20)]
    for day in days:
        folder = checkpoint.checkpoint_path(str(tmp_path), day)
        folder.mkdir(parents=True)
        update = {"trained_until": day, "complete": True}
        manifest = new_manifest(lake, 1).model_copy(update=update)
        (folder / checkpoint.MANIFEST).write_text(manifest.model_dump_json())
    command = ["train", "clean", "--spec", str(spec_path), "--lake", str(tmp_path)]
    assert main([*command, "--keep-days", "7"]) == 0
    checkpoints = checkpoint.list_checkpoints(str(tmp_path), lake.spec.hash)
    assert [manifest.trained_until for _, manifest in checkpoints] == days[-8:]


def train_command(own: Lake, spec: Path, *options: str) -> list[str]:
    where = ["--spec", str(spec), "--lake", own.root, "--days", str(FIRST)]
    return [sys.executable, "-m", "gemline", "train", "gem", *where, *SIZES, *options]


def torchrun_workers(lake: str) -> list[int]:
    """The ids of the processes that train a lake under torchrun, by rank."""
    pids = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (path / "cmdline").read_text().split("\0")
            if "gemline" not in arguments or "--config" not in arguments:
                continue
            variables = (path / "environ").read_text().split("\0")
            environment = dict(v.split("=", 1) for v in variables if "=" in v)
            if environment.get("GEMLINE_TEST") == lake:
                pids[int(environment["RANK"])] = int(path.name)
        except (OSError, KeyError):
            continue
    return [pids[rank] for rank in sorted(pids)]


def trained_and_available_rows(own: Lake) -> tuple[int, int]:
    """The number of rows that a day was trained on, and of existing rows."""
    with process_group():
        state, reader = load_train_state(own, FIRST)
        manifest = state.manifest.model_copy(update={"num_shards": 1})
        batches = DayBatches(own, reader, FIRST, manifest).shard_batches(0)
        return state.manifest.rows, sum(map(len, batches))


@pytest.mark.proof
def test_a_killed_rank_is_restarted_and_fewer_processes_resume(own: Lake, spec_path: Path) -> None:
    """One of two ranks is killed: all restart from the checkpoint. Then both are killed."""
    partial = checkpoint.checkpoint_path(own.root, FIRST, complete=False)
    env = os.environ | {"GEMLINE_TEST": own.root, "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(
        train_command(own, spec_path, "--processes", "2"), env=env, start_new_session=True,
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip

    def restarted() -> bool:
        workers = torchrun_workers(own.root)
        return len(workers) == 2 and not set(workers) & set(first)

    try:
        wait_for(lambda: checkpoint.read_manifest(partial, own.spec.hash) is not None, running)
        wait_for(lambda: len(torchrun_workers(own.root)) == 2, running)
        first = torchrun_workers(own.root)
        os.kill(first[1], signal.SIGKILL)
        wait_for(restarted, running)
        before = checkpoint.read_manifest(partial, own.spec.hash)
        wait_for(lambda: checkpoint.read_manifest(partial, own.spec.hash) != before, running)
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        for pid in torchrun_workers(own.root):
            os.kill(pid, signal.SIGKILL)
    saved = checkpoint.read_manifest(partial, own.spec.hash)
    assert saved is not None and saved.num_shards == 2 and saved.rows > 0
    resumed = subprocess.run(
        train_command(own, spec_path), check=False, env=env, capture_output=True, text=True
    )
    assert resumed.returncode == 0, resumed.stderr
    trained, available = trained_and_available_rows(own)
    assert trained == available > saved.rows


def wait_for(condition: Callable[[], bool], running: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert running.poll() is None, running.communicate()[1]
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("the condition did not come true in 300 s")


def stop_responding(rank: int, folder: str) -> None:
    """One of three processes stops answering."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = Path(folder, "port").read_text()
    Path(folder, f"{rank}.ready").touch()
    while len(list(Path(folder).glob("*.ready"))) < 3:  # the second below is short for imports
        time.sleep(0.01)
    try:
        with process_group(timedelta(seconds=1)):
            if rank == 1:
                time.sleep(30)
            dist.all_reduce(torch.ones(1))
    except TemporaryError as error:
        Path(folder, f"{rank}.txt").write_text(str(error))


def test_an_unresponsive_process_is_named(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (tmp_path / "port").write_text(str(free.getsockname()[1]))
    context = run(stop_responding, (str(tmp_path),), 3, join=False)
    deadline = time.monotonic() + 300
    while not (tmp_path / "0.txt").is_file() and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in context.processes:
        process.kill()
    message = (tmp_path / "0.txt").read_text()
    assert re.fullmatch(r"lost processes: .*[Rr]anks?:? 1 .*The last checkpoint .*", message, re.S)


def train_on_nan(
    rank: int, features: FeatureSchema, batches: list[Batch], manifest: Manifest, folder: str
) -> None:
    """The loss of the second process is not finite."""
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    state = new_state(manifest, ParallelismConfig())
    batch = batches[rank]
    if rank == 1:
        batch = replace(batch, labels=torch.full_like(batch.labels, torch.nan))
    before = deepcopy(dict(state.model.core.named_parameters()))
    loss = Loss.from_config(CONFIG, features)
    with pytest.raises(NonFiniteLossError) as raised:
        train_step(state.model, batch, len(batch), state.optimizer, loss)
    after = dict(state.model.core.named_parameters())
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    error = non_finite_loss_error(Path(folder), state, batch, raised.value.ranks)
    Path(folder, f"{rank}.txt").write_text(str(error))
    dist.destroy_process_group()


def test_a_loss_that_is_not_finite_on_one_process_stops_all_of_them(
    lake: Lake, tmp_path: Path
) -> None:
    features, batches = some_batches(lake, 2)
    run(train_on_nan, (features, batches, new_manifest(lake, 2), str(tmp_path)), 2)
    first, second = (Path(tmp_path, f"{rank}.txt").read_text() for rank in range(2))
    assert first == second and "the loss of process 1 is not finite at step 1" in first
    report = json.loads((tmp_path / "non_finite_loss.json").read_text())
    assert report["impressions"] == batches[1].impression_ids.tolist()


@pytest.mark.proof
def test_a_full_disk_loses_no_checkpoint(lake: Lake, spec_path: Path, tmp_path: Path) -> None:
    """The second checkpoint does not fit; once there is room, training resumes from the first."""
    disk = tmp_path / "disk"
    disk.mkdir()
    used = sum(-(-file.stat().st_size // 4096) * 4 for file in Path(lake.root).rglob("*"))
    size = used + CHECKPOINT_KB * 5 // 4
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "gemline", str(disk)]
    can_mount = shutil.which("mount") is not None
    if not can_mount or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a small tmpfs cannot be mounted here")
    try:
        own = Lake(str(disk / "lake"), lake.spec)
        shutil.copytree(lake.root, own.root)
        command = train_command(own, spec_path)
        full = subprocess.run(command, check=False, capture_output=True, text=True)
        assert full.returncode == 75, full.stderr
        assert "the disk is full" in full.stderr.splitlines()[-1]
        ((_, saved),) = checkpoint.list_checkpoints(own.root, own.spec.hash)
        assert saved.rows > 0 and not saved.complete
        subprocess.run(["mount", "-o", f"remount,size={size + 60_000}k", str(disk)], check=True)
        subprocess.run(command, check=True, capture_output=True)
        trained, available = trained_and_available_rows(own)
        assert trained == available > saved.rows
    finally:
        subprocess.run(["umount", str(disk)], check=True)
