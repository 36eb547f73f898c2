"""Killed steps, a full disk and concurrent writers leave correct tables or a one-line error."""

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

from dags.pipeline import data_steps
from dags.steps import PipelinePaths, Step
from etl.spec import load_spec
from etl.tables.lake import Lake
from tests.conftest import FIRST, LAST
from tests.pipeline import TABLES, rows

KILLS = 8
CONTENDED = ("ingest", "history", "examples")


@pytest.fixture
def steps(spec_path: Path, raw: Path, tmp_path: Path) -> list[Step]:
    paths = PipelinePaths(spec_path, str(raw), str(tmp_path / "lake"))
    return data_steps(load_spec(spec_path), paths, ("--days", f"{FIRST}:{LAST}"))


def start(step: Step) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gemline", *step.command], start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(step: Step) -> tuple[int, str]:
    """Run a step to its end; returns its exit code and its standard error."""
    process = start(step)
    _, stderr = process.communicate(timeout=300)
    return process.returncode, stderr


def data_files(lake: Path, step: Step) -> set[Path]:
    """Files of the tables that a step writes, committed or not."""
    files = (path for name in step.writes for path in (lake / name).rglob("*.parquet"))
    return {path for path in files if "_delta_log" not in path.parts}


def commits(lake: Path, step: Step) -> set[Path]:
    """Commit files of the tables that a step writes."""
    return {p for name in step.writes for p in (lake / name / "_delta_log").glob("*.json")}


@pytest.mark.proof
def test_a_step_killed_between_staging_and_commit_can_be_repeated(
    lake: Lake, steps: list[Step], tmp_path: Path
) -> None:
    folder, rng = tmp_path / "lake", random.Random(0)
    num_before_commit = 0
    for number in range(KILLS):
        step = steps[number * len(steps) // KILLS]
        files_before, commits_before = data_files(folder, step), commits(folder, step)
        process = start(step)
        while data_files(folder, step) == files_before and process.poll() is None:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 2) if number % 4 == 3 else 0)
        with suppress(ProcessLookupError):  # the process has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        num_before_commit += commits(folder, step) == commits_before
        is_last_kill = number + 1 == KILLS or steps[(number + 1) * len(steps) // KILLS] is not step
        if is_last_kill:
            assert finish(step)[0] == 0, step.name
    print(f"{KILLS} kills, {num_before_commit} between staging and commit", flush=True)
    assert num_before_commit >= KILLS // 4
    assert_same_tables(Lake(str(folder), lake.spec), lake)


def assert_same_tables(actual: Lake, expected: Lake) -> None:
    for name in TABLES:
        assert rows(actual, name) == rows(expected, name), name


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """The lake's folder on a file system of 800 kB."""
    folder = tmp_path / "lake"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=800k", "gemline", str(folder)]
    if not shutil.which("mount"):
        pytest.skip("there is no mount command")
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small tmpfs cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.proof
def test_a_full_disk_gives_a_one_line_error_and_loses_nothing(
    lake: Lake, steps: list[Step], small_disk: Path
) -> None:
    size_kb, num_full = 800, 0
    for step in steps:
        code, stderr = finish(step)
        while code:
            assert code == 75 and "the disk is full" in stderr.splitlines()[-1], stderr[-3000:]
            size_kb, num_full = size_kb * 2, num_full + 1
            grow = ["mount", "-o", f"remount,size={size_kb}k", str(small_disk)]
            subprocess.run(grow, check=True)
            code, stderr = finish(step)
    print(f"the disk was full {num_full} times and ended at {size_kb} kB", flush=True)
    assert num_full >= 2
    assert_same_tables(Lake(str(small_disk), lake.spec), lake)


@pytest.mark.proof
def test_the_second_of_two_concurrent_writers_is_refused(
    lake: Lake, steps: list[Step], tmp_path: Path
) -> None:
    copied = Lake(str(tmp_path / "lake"), lake.spec)
    shutil.copytree(lake.root, copied.root)
    contended = [step for step in steps if step.name in CONTENDED]
    refused = 0
    for step in contended:
        processes = [start(step), start(step)]
        outputs = [process.communicate(timeout=300)[1] for process in processes]
        codes = [process.returncode for process in processes]
        for code, stderr in zip(codes, outputs, strict=True):
            assert code in (0, 75), (step.name, stderr[-3000:])
            is_refused = "is already being run by gemline" in stderr.splitlines()[-1]
            assert not code or is_refused, (step.name, stderr)
        refused += sum(code == 75 for code in codes)
        assert 0 in codes, step.name
        for name in set(step.writes) & set(TABLES):
            assert rows(copied, name) == rows(lake, name), name
    print(f"{refused} of {2 * len(contended)} writers were refused", flush=True)
    assert refused
