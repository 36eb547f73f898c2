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


def test_a_repository_that_does_not_answer_is_a_temporary_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etl.runtime.java.FETCH_TIMEOUT_SECONDS", 0.01)
    with pytest.raises(TemporaryError, match=r"\(no answer within 0.01 seconds\): put io.delta_"):
        fetch_jars(tmp_path / "jars")
    assert not (tmp_path / "jars").exists()
