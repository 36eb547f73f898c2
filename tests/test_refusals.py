"""What a user did wrong is one sentence and exit code 2, and nothing is written."""

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
    """Run a command that must be refused; returns its sentence."""

    def run(*words: str) -> str:
        assert main(words) == 2
        said = capfd.readouterr().err.strip().splitlines()
        assert "Traceback" not in "".join(said)
        return said[-1]

    return run


def test_what_is_not_there_is_named(
    refused: Callable[..., str], spec_path: Path, own: Lake
) -> None:
    where = ["--spec", str(spec_path), "--lake", own.root]
    split = ["--train", "2026-01-01:2026-01-02", "--test", "2026-01-04", "--landed", str(LAST)]
    assert "no ads on surface 'nowhere'; known: feed" in refused(
        "rank", "train", *where, *split, "--surface", "nowhere"
    )
    feed = ["--surface", "feed"]
    for words in (("score", "--days", str(LAST), *feed), ("promote", *split, *feed)):
        assert "no ranker of feed is promoted" in refused("rank", *words[:1], *where, *words[1:])
    assert "there is none before" in refused("rank", "rollback", *where, *feed)
    assert "run `gemline rank promote` first" in refused(
        "rank", "store", *where, "--landed", str(LAST)
    )
    assert "run `gemline rank store` first" in refused("rank", "serve", *where)
    assert "no examples of 2026-02-01" in refused("train", "gem", *where, "--days", "2026-02-01")
    assert "has no sequence 'none'; known: behaviour" in refused(
        "train", "gem", *where, "--days", str(FIRST), "--sequence", "none"
    )
    assert "no impression 'imp-0'" in refused("explain", *where, "imp-0")
    assert "none.yaml: no such spec" in refused(
        "run", "--spec", "none.yaml", "--raw", "r", "--lake", own.root, "--days", DAYS
    )
    assert "too short" in refused("run", *where, "--raw", "r", "--days", str(FIRST))


def test_files_of_today_are_not_removed(
    spec_path: Path, lake: Lake, capsys: pytest.CaptureFixture[str]
) -> None:
    """A running write may have staged them."""
    with pytest.raises(SystemExit) as stopped:
        main(["etl", "vacuum", "--spec", str(spec_path), "--lake", lake.root, "--keep-days", "0"])
    assert stopped.value.code == 2 and "greater than or equal to 1" in capsys.readouterr().err


def test_tables_of_another_spec_are_refused_by_every_reader(
    refused: Callable[..., str], own: Lake, tmp_path: Path
) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(SPEC.read_text().replace("lateness: 2d", "lateness: 5d"))
    where = ["--spec", str(other), "--lake", own.root, "--days", DAYS]
    for command in (("etl", "labels"), ("features", "items"), ("train", "gem")):
        said = refused(*command, *where)
        assert own.spec.hash in said and "another --lake" in said, (command, said)


def test_a_missing_log_stops_the_line_before_any_table(
    refused: Callable[..., str], spec_path: Path, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    where = ["--spec", str(spec_path), "--raw", str(tmp_path / "none"), "--lake", str(lake)]
    assert "exit code 2; the reason is above" in refused("run", *where, "--days", DAYS)
    assert {path.name for path in lake.iterdir()} <= {"_line"}


@pytest.fixture
def check() -> ModuleType:
    """What `make` runs before it installs anything."""
    found = importlib.util.spec_from_file_location("check", ROOT / "requirements/check.py")
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_what_a_machine_lacks_is_told_with_its_fix(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if shutil.disk_usage(ROOT).free > check.INSTALL_DISK_GB * 1e9:
        assert check.lacks() == []
    assert check.lacks_for_tests(1) == [], "they run now"
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "version_info", (3, 10, 1))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 10**12, 3 * 10**9))
    python, java, disk = check.lacks()
    assert "3.10.1: name another with `make PYTHON=python3.12" in python
    assert "install openjdk-17-jre-headless" in java
    assert "there are 3.0: free some" in disk


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
    assert "there are 1.0: free some, or set TMPDIR" in disk
    assert "need 9.0 GB of available memory; there are 6.5" in memory and "WORKERS=1" in memory
    assert not any("memory" in lack for lack in check.lacks_for_tests(1))
