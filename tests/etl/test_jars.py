"""Spark loads only JARs with the pinned checksums."""

import shutil
from pathlib import Path

import pytest

from etl.errors import TemporaryError, UserError
from etl.runtime.java import delta_jars, fetch_jars, jar_names


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """GEMLINE_JARS, set to a folder with copies of the JARs."""
    for jar in delta_jars():
        shutil.copyfile(jar, tmp_path / jar.name)
    monkeypatch.setenv("GEMLINE_JARS", str(tmp_path))
    return tmp_path


def test_a_jar_with_another_checksum_is_refused(folder: Path) -> None:
    assert [jar.parent for jar in delta_jars()] == [folder, folder]
    changed = folder / jar_names()[1]
    changed.write_bytes(changed.read_bytes() + b"more")
    with pytest.raises(UserError, match=f"{changed} has SHA-256 .*remove it"):
        delta_jars()


def test_two_processes_may_fetch_the_jars_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one fetches all of them while the first is copying one."""
    copy, fetched, folder = shutil.copyfile, delta_jars(), tmp_path / "jars"
    is_first = iter([True])

    def resolve(ivy: Path) -> str:
        (ivy / "jars").mkdir()
        for jar in fetched:
            copy(jar, ivy / "jars" / jar.name)
        return ""

    def copy_slowly(source: Path, target: Path) -> None:
        copy(source, target)
        if next(is_first, False):
            fetch_jars(folder)

    monkeypatch.setattr("etl.runtime.java._resolve_with_ivy", resolve)
    monkeypatch.setattr("etl.runtime.java.shutil.copyfile", copy_slowly)
    fetch_jars(folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted(jar_names())


def test_a_repository_that_does_not_answer_is_a_temporary_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etl.runtime.java.FETCH_TIMEOUT_SECONDS", 0.01)
    with pytest.raises(TemporaryError, match=r"\(no answer within 0.01 seconds\): put io.delta_"):
        fetch_jars(tmp_path / "jars")
    assert not (tmp_path / "jars").exists()
