"""A training goes on after processes are lost, with as many as there are; each row once."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from copy import deepcopy
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from etl.errors import TemporaryError
from etl.tables.lake import Lake
from features.inputs import Features
from gemline import main
from tests.conftest import FIRST
from tests.training.many import run, some_batches
from training.build import build
from training.config import SpreadOptions, TrainConfig
from training.data.batch import Batch
from training.day import Day, Lanes
from training.gem import load_trained
from training.loop import checkpoint
from training.loop.checkpoint import Manifest, Trained
from training.loop.loss import Loss
from training.loop.nan_guard import report_non_finite_loss
from training.loop.step import NonFiniteLossError, train_step
from training.loop.writer import Writer
from training.model.lookup import table_rows
from training.parallel.processes import process_group
from training.parallel.sparse import parts_of

SIZES = ["--scale", "tiny", "--batch-rows", "24", "--checkpoint-every", "5"]
CONFIG = TrainConfig(scale="tiny", item_rows=128)
WHOLE = StateDictOptions(full_state_dict=True)
WRITTEN = 4, SpreadOptions(groups=2, dense="sharded")
READ_BY = {
    "by rows, dense sharded": (2, SpreadOptions(by_rows=True, dense="sharded")),
    "alone": (1, SpreadOptions()),
}


@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=5),
    shares=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), max_size=4),
)
def test_lanes_give_each_batch_once_to_whoever_goes_on(
    lengths: list[int], shares: list[tuple[int, int]]
) -> None:
    """Some processes take some steps, then others go on, and in the end one takes what is left."""
    batches = [[(lane, n) for n in range(length)] for lane, length in enumerate(lengths)]
    taken, seen = dict.fromkeys(range(len(lengths)), 0), []
    for world, steps in [*shares, (1, sum(lengths))]:
        after = dict(taken)
        for rank in range(world):
            own = {n: iter(batches[n][taken[n] :]) for n in range(rank, len(lengths), world)}
            lanes: Any = Lanes(own, taken)
            seen += islice(lanes, steps)
            after |= {n: lanes.taken[n] for n in own}
        taken = after
    assert sorted(seen) == sorted(batch for lane in batches for batch in lane)


def manifest(lake: Lake, world: int) -> Manifest:
    return Manifest(
        spec=lake.spec.hash, match=lake.spec.match, events=(), training=CONFIG, processes=world,
        versions={}, trained_from=FIRST, trained_until=FIRST, complete=False, batches=0, steps=0,
    )  # fmt: skip


def state(trained: Trained) -> dict[str, Any]:
    """Everything that the next step depends on, whole, wherever its parts lie."""
    sizes = CONFIG.sizes
    rows = table_rows(trained.model.core.features, CONFIG.item_rows, sizes.user_rows)
    with torch.no_grad():
        tables = trained.tables({name: torch.arange(count) for name, count in rows.items()})
    states = {}
    told = trained.tables.fused_optimizer.state_dict()["state"]
    for name, count in rows.items():
        whole = torch.zeros(count)
        for value in told.get(f"collection.embeddings.{name}.weight", {}).values():
            for first, held in parts_of(value):
                whole[first : first + len(held)] = held
        dist.all_reduce(whole, dist.ReduceOp.MAX)
        states[name] = whole
    core = trained.model.core
    optimizer = get_optimizer_state_dict(core, trained.optimizer, options=WHOLE)
    return {
        "tables": {name: found.clone() for name, found in tables.items()},
        "states": states,
        "dense": get_model_state_dict(core, options=WHOLE),
        "average": get_model_state_dict(trained.averaged.module, options=WHOLE),
        "moments": optimizer["state"],
        "asked": trained.asked.days,
    }


def step(trained: Trained, batches: list[Batch], features: Features) -> None:
    loss = Loss.of(CONFIG, features.objectives)
    batch = batches[dist.get_rank()]
    train_step(trained.model, batch, len(batch), trained.optimizer, loss)
    trained.averaged.update_parameters(trained.model.core)
    trained.replicas.stepped()


def learn_and_write(
    rank: int,
    features: Features,
    batches: list[list[Batch]],
    start: Manifest,
    folder: str,
) -> None:
    world, options = WRITTEN
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=world)
    torch.set_num_threads(1)
    trained = build(features, start, torch.ones(100_000, dtype=torch.bool).numpy(), options)
    writer = Writer()
    step(trained, batches[0], features)
    step(trained, batches[1], features)
    writer.begin(Path(folder, "checkpoint"), trained)
    told = deepcopy(state(trained))
    step(trained, batches[2], features)  # goes on while it is written
    writer.finish()
    if rank == 0:
        torch.save(told, f"{folder}/told.pt")
    dist.destroy_process_group()


def read(rank: int, features: Features, way: str, start: Manifest, folder: str) -> None:
    world, options = READ_BY[way]
    meet = f"file://{folder}/meet-{way.replace(' ', '-')}"
    dist.init_process_group("gloo", meet, rank=rank, world_size=world)
    trained = build(features, start, torch.ones(100_000, dtype=torch.bool).numpy(), options)
    checkpoint.load(Path(folder, "checkpoint"), trained)
    found = state(trained)
    if rank == 0:
        torch.save(found, f"{folder}/{way}.pt")
    dist.destroy_process_group()


def test_a_checkpoint_is_of_one_moment_and_any_number_of_processes_goes_on_from_it(
    lake: Lake, tmp_path: Path
) -> None:
    features, found = some_batches(lake, 12)
    batches = [found[4 * n : 4 * (n + 1)] for n in range(3)]
    start = manifest(lake, WRITTEN[0])
    run(learn_and_write, (features, batches, start, str(tmp_path)), WRITTEN[0])
    told = torch.load(tmp_path / "told.pt", weights_only=True)
    assert all(rows.any() for rows in told["states"].values())
    for way, (world, _) in READ_BY.items():
        run(read, (features, way, start, str(tmp_path)), world)
        again = torch.load(tmp_path / f"{way}.pt", weights_only=True)
        torch.testing.assert_close(again, told, rtol=0, atol=0, msg=way)


def test_gems_of_long_ago_are_forgotten_and_no_other(
    lake: Lake, spec_path: Path, tmp_path: Path
) -> None:
    days = [FIRST + timedelta(days=n) for n in range(20)]
    for day in days:
        folder = checkpoint.folder(str(tmp_path), day)
        folder.mkdir(parents=True)
        made = manifest(lake, 1).model_copy(update={"trained_until": day, "complete": True})
        (folder / checkpoint.MANIFEST).write_text(made.model_dump_json())
    words = ["train", "forget", "--spec", str(spec_path), "--lake", str(tmp_path)]
    assert main([*words, "--keep-days", "7"]) == 0
    left = [found.trained_until for _, found in checkpoint.written(str(tmp_path), lake.spec.hash)]
    assert left == days[-8:]


def command(own: Lake, spec: Path, *more: str) -> list[str]:
    where = ["--spec", str(spec), "--lake", own.root, "--days", str(FIRST)]
    return [sys.executable, "-m", "gemline", "train", "gem", *where, *SIZES, *more]


def children(words: list[str]) -> list[int]:
    """Processes that train under torchrun, by rank."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            line = (path / "cmdline").read_text().split("\0")
            if "gemline" in line and "--config" in line:
                told = dict(
                    v.split("=", 1) for v in (path / "environ").read_text().split("\0") if "=" in v
                )
                if told.get("GEMLINE_TEST") in words:
                    found[int(told["RANK"])] = int(path.name)
        except (OSError, KeyError):
            continue
    return [found[rank] for rank in sorted(found)]


def rows_of(own: Lake) -> tuple[int, int]:
    """Rows that a day's training has learned from, and rows that there are to learn from."""
    with process_group():
        trained, reader = load_trained(own, FIRST)
        day = Day(own, reader, FIRST, trained.manifest.model_copy(update={"processes": 1}))
        return trained.manifest.rows, sum(map(len, day.lane(0)))


@pytest.mark.proof
def test_a_rank_that_is_killed_comes_back_and_fewer_processes_go_on(
    own: Lake, spec_path: Path
) -> None:
    """One of two ranks is killed: all begin again from the checkpoint. Then both, for good."""
    partial = checkpoint.folder(own.root, FIRST, complete=False)
    env = os.environ | {"GEMLINE_TEST": own.root, "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(
        command(own, spec_path, "--processes", "2"), env=env, start_new_session=True,
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        first = wait_for(
            lambda: checkpoint.read_manifest(partial, own.spec.hash) and children([own.root]),
            running,
        )
        os.kill(first[1], signal.SIGKILL)
        again = wait_for(
            lambda: (c := children([own.root])) and len(c) == 2 and not set(c) & set(first) and c,
            running,
        )
        before = checkpoint.read_manifest(partial, own.spec.hash)
        wait_for(lambda: checkpoint.read_manifest(partial, own.spec.hash) != before, running)
        assert again
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        for pid in children([own.root]):
            os.kill(pid, signal.SIGKILL)
    kept = checkpoint.read_manifest(partial, own.spec.hash)
    assert kept is not None and kept.processes == 2 and kept.rows > 0
    done = subprocess.run(command(own, spec_path), env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    learned, there = rows_of(own)
    assert learned == there > kept.rows


def wait_for(what: Any, running: subprocess.Popen[str]) -> Any:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert running.poll() is None, running.communicate()[1]
        found = what()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("nothing happened")


def lost(rank: int, folder: str) -> None:
    """One of three processes stops answering."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = Path(folder, "port").read_text()
    try:
        with process_group(timedelta(seconds=1)):
            if rank == 1:
                time.sleep(30)
            dist.all_reduce(torch.ones(1))
    except TemporaryError as error:
        Path(folder, f"{rank}.txt").write_text(str(error))


def test_a_process_that_does_not_answer_is_named(tmp_path: Path) -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (tmp_path / "port").write_text(str(free.getsockname()[1]))
    context = run(lost, (str(tmp_path),), 3, join=False)
    deadline = time.monotonic() + 300
    while not (tmp_path / "0.txt").is_file() and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in context.processes:
        process.kill()
    said = (tmp_path / "0.txt").read_text()
    assert "processes do not answer" in said and "1" in said.partition(":")[2]


def learn_from_nan(
    rank: int, features: Features, batches: list[Batch], start: Manifest, folder: str
) -> None:
    """The loss of the second process is not finite."""
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    trained = build(features, start, torch.ones(100_000, dtype=torch.bool).numpy(), SpreadOptions())
    batch = batches[rank]
    if rank == 1:
        batch = replace(batch, labels=torch.full_like(batch.labels, torch.nan))
    before = deepcopy(dict(trained.model.core.named_parameters()))
    loss = Loss.of(CONFIG, features.objectives)
    with pytest.raises(NonFiniteLossError) as raised:
        train_step(trained.model, batch, len(batch), trained.optimizer, loss)
    after = dict(trained.model.core.named_parameters())
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    report = report_non_finite_loss(Path(folder), trained, batch, raised.value.ranks)
    Path(folder, f"{rank}.txt").write_text(str(report))
    dist.destroy_process_group()


def test_a_loss_that_is_not_finite_on_one_process_stops_all(lake: Lake, tmp_path: Path) -> None:
    features, batches = some_batches(lake, 2)
    run(learn_from_nan, (features, batches, manifest(lake, 2), str(tmp_path)), 2)
    first, second = (Path(tmp_path, f"{rank}.txt").read_text() for rank in range(2))
    assert first == second and "the loss of process 1 is not finite at step 1" in first
    described = json.loads((tmp_path / "non_finite_loss.json").read_text())
    assert described["impressions"] == batches[1].impressions.tolist()


@pytest.mark.proof
def test_a_disk_that_is_full_loses_no_checkpoint(
    lake: Lake, spec_path: Path, tmp_path: Path
) -> None:
    """The second checkpoint does not fit; when there is room, training goes on from the first."""
    place = tmp_path / "disk"
    place.mkdir()
    used = sum(file.stat().st_size for file in Path(lake.root).rglob("*")) // 1024
    size = used + 30_000  # a checkpoint of this model has 24 MB
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "gemline", str(place)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small tmpfs cannot be mounted here")
    try:
        own = Lake(str(place / "lake"), lake.spec)
        shutil.copytree(lake.root, own.root)
        full = subprocess.run(command(own, spec_path), capture_output=True, text=True)
        assert full.returncode == 75, full.stderr
        assert "the disk is full" in full.stderr.splitlines()[-1]
        ((_, kept),) = checkpoint.written(own.root, own.spec.hash)
        assert kept.rows > 0 and not kept.complete
        subprocess.run(["mount", "-o", f"remount,size={size + 60_000}k", str(place)], check=True)
        assert subprocess.run(command(own, spec_path), capture_output=True).returncode == 0
        learned, there = rows_of(own)
        assert learned == there > kept.rows
    finally:
        subprocess.run(["umount", str(place)], check=True)
