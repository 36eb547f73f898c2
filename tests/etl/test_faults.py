"""Kills between staging and commit, a full disk, two writers: the right table or one sentence."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dags.line import Place, Step, data_steps
from etl.tables.lake import Lake
from tests.conftest import FIRST, LAST
from tests.pipeline import TABLES, rows

KILLS = 8  # with those in every step of the line, more than twenty
CONTENDED = ("ingest", "history", "examples")


@pytest.fixture
def steps(spec_path: Path, raw: Path, tmp_path: Path) -> list[Step]:
    place = Place(spec_path, str(raw), str(tmp_path / "lake"))
    return data_steps(place, ("--days", f"{FIRST}:{LAST}"))


def start(step: Step) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gemline", *step.command], start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(step: Step) -> tuple[int, str]:
    child = start(step)
    _, said = child.communicate(timeout=300)
    return child.returncode, said


def staged(lake: Path, step: Step) -> set[Path]:
    """Files of the tables that a step writes, committed or not."""
    found = (path for name in step.writes for path in (lake / name).rglob("*.parquet"))
    return {path for path in found if "_delta_log" not in path.parts}


def commits(lake: Path, step: Step) -> set[Path]:
    return {p for name in step.writes for p in (lake / name / "_delta_log").glob("*.json")}


@pytest.mark.proof
def test_killed_between_staging_and_commit(lake: Lake, steps: list[Step], tmp_path: Path) -> None:
    own, rng = tmp_path / "lake", random.Random(0)
    between = 0
    for number in range(KILLS):
        step = steps[number * len(steps) // KILLS]
        before, committed = staged(own, step), commits(own, step)
        child = start(step)
        while staged(own, step) == before and child.poll() is None:
            time.sleep(0.001)
        time.sleep((0, 0, 0, rng.uniform(0, 2))[number % 4])
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        between += commits(own, step) == committed
        last = number + 1 == KILLS or steps[(number + 1) * len(steps) // KILLS] is not step
        if last:
            assert finish(step)[0] == 0, step.name
    print(f"{KILLS} kills, {between} between staging and commit", flush=True)
    assert between >= KILLS // 4
    made = Lake(str(own), lake.spec)
    for name in TABLES:
        assert rows(made, name) == rows(lake, name), name


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "lake"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=800k", "gemline", str(place)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small tmpfs cannot be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.proof
def test_a_full_disk_is_said_in_one_sentence_and_nothing_is_lost(
    lake: Lake, steps: list[Step], small_disk: Path
) -> None:
    size, full = 800, 0
    for step in steps:
        code, said = finish(step)
        while code:
            assert code == 75 and "the disk is full" in said.splitlines()[-1], said[-3000:]
            size, full = size * 2, full + 1
            grow = ["mount", "-o", f"remount,size={size}k", str(small_disk)]
            subprocess.run(grow, check=True)
            code, said = finish(step)
    print(f"the disk was full {full} times, at last it has {size} kB", flush=True)
    assert full >= 2
    made = Lake(str(small_disk), lake.spec)
    for name in TABLES:
        assert rows(made, name) == rows(lake, name), name


@pytest.mark.proof
def test_two_writers_on_the_same_days(lake: Lake, steps: list[Step], tmp_path: Path) -> None:
    own = Lake(str(tmp_path / "lake"), lake.spec)
    shutil.copytree(lake.root, own.root)
    contended = [step for step in steps if step.name in CONTENDED]
    refused = 0
    for step in contended:
        children = [start(step), start(step)]
        said = [child.communicate(timeout=300)[1] for child in children]
        codes = [child.returncode for child in children]
        for code, text in zip(codes, said, strict=True):
            assert code in (0, 75), (step.name, text[-3000:])
            second = "is already being run by gemline" in text.splitlines()[-1]
            assert not code or second, (step.name, text)
        refused += sum(code == 75 for code in codes)
        assert 0 in codes, step.name
        for name in set(step.writes) & set(TABLES):
            assert rows(own, name) == rows(lake, name), name
    print(f"{refused} of {2 * len(contended)} writers were second", flush=True)
    assert refused
