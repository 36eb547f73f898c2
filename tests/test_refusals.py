"""User errors exit with code 2 and one line that names the fix, and write nothing."""

import importlib.util
import shutil
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from etl.tables.lake import Lake
from gemline import main
from tests.conftest import FIRST, LAST, ROOT, SPEC

DAYS = f"{FIRST}:{LAST}"


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must be refused; returns the last line of its error."""

    def run(*arguments: str) -> str:
        assert main(arguments) == 2
        lines = capfd.readouterr().err.strip().splitlines()
        assert "Traceback" not in "".join(lines)
        return lines[-1]

    return run


def test_what_is_missing_is_named(refused: Callable[..., str], spec_path: Path, own: Lake) -> None:
    flags = ["--spec", str(spec_path), "--lake", own.root]
    split = ["--train", "2026-01-01:2026-01-02", "--test", "2026-01-04", "--data-until", str(LAST)]
    assert "no ads on surface 'nowhere'; known: feed" in refused(
        "rank", "train", *flags, *split, "--surface", "nowhere"
    )
    feed = ["--surface", "feed"]
    for command in (("score", "--days", str(LAST), *feed), ("promote", *split, *feed)):
        assert "no ranker of feed is promoted" in refused("rank", *command, *flags)
    assert "there is no previous version to roll back to" in refused(
        "rank", "rollback", *flags, *feed
    )
    assert "run `gemline rank promote` first" in refused(
        "rank", "materialize", *flags, "--data-until", str(LAST)
    )
    assert "run `gemline rank materialize` first" in refused("rank", "serve", *flags)
    assert "no examples of 2026-02-01" in refused("train", "gem", *flags, "--days", "2026-02-01")
    assert "has no sequence 'none'; known: behaviour" in refused(
        "train", "gem", *flags, "--days", str(FIRST), "--sequence", "none"
    )
    assert "no impression 'imp-0'" in refused("explain", *flags, "imp-0")
    assert "none.yaml: no such spec" in refused(
        "run", "--spec", "none.yaml", "--raw", "r", "--lake", own.root, "--days", DAYS
    )
    assert "too short" in refused("run", *flags, "--raw", "r", "--days", str(FIRST))


def test_vacuum_of_files_of_today_is_refused(
    spec_path: Path, lake: Lake, capsys: pytest.CaptureFixture[str]
) -> None:
    """A running write may not have committed them yet."""
    with pytest.raises(SystemExit) as stopped:
        main(["etl", "vacuum", "--spec", str(spec_path), "--lake", lake.root, "--keep-days", "0"])
    assert stopped.value.code == 2 and "greater than or equal to 1" in capsys.readouterr().err


def test_tables_of_another_spec_are_refused_by_every_reader(
    refused: Callable[..., str], own: Lake, tmp_path: Path
) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(SPEC.read_text().replace("allowed_lateness: 2d", "allowed_lateness: 5d"))
    flags = ["--spec", str(other), "--lake", own.root, "--days", DAYS]
    for command in (("etl", "labels"), ("features", "items"), ("train", "gem")):
        message = refused(*command, *flags)
        assert own.spec.hash in message and "another --lake" in message, (command, message)


def test_a_missing_log_stops_the_pipeline_before_any_table_is_written(
    refused: Callable[..., str], spec_path: Path, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    flags = ["--spec", str(spec_path), "--raw", str(tmp_path / "none"), "--lake", str(lake)]
    assert "exit code 2; the reason is above" in refused("run", *flags, "--days", DAYS)
    assert {path.name for path in lake.iterdir()} <= {"_pipeline"}


@pytest.fixture
def check() -> ModuleType:
    """The module that `make` runs before the installation."""
    spec = importlib.util.spec_from_file_location("check", ROOT / "requirements/check.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_missing_requirements_of_a_machine_are_listed_with_their_fix(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(check, "available_memory_gb", lambda: 64.0)
    if shutil.disk_usage(ROOT).free > check.INSTALL_DISK_GB * 1e9:
        assert check.lacks() == []
    assert check.lacks_for_tests(1) == [], "the tests are running on this machine"
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "version_info", (3, 10, 1))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 10**12, 3 * 10**9))
    python, java, disk = check.lacks()
    assert "3.10.1: name another with `make PYTHON=python3.12" in python
    assert "install openjdk-17-jre-headless" in java
    assert "3.0 GB are available: free some space" in disk


def test_a_machine_too_small_for_the_tests_is_refused_with_its_fix(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 10**12, 10**9))
    monkeypatch.setattr(check, "available_memory_gb", lambda: 6.5)
    java, disk, memory = check.lacks_for_tests(2)
    assert "install openjdk-17-jre-headless" in java
    assert "1.0 GB are available: free some space, or set TMPDIR" in disk
    assert "need 9.0 GB of memory, 6.5 GB are available" in memory and "WORKERS=1" in memory
    assert not any("memory" in lack for lack in check.lacks_for_tests(1))
