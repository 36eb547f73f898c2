"""Only the JARs that the project was tested with are given to Spark."""

import shutil
from pathlib import Path

import pytest

from etl.errors import TemporaryError, UserError
from etl.jars import delta_jars, fetch, jar_names


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the JARs, named by GEMLINE_JARS."""
    for jar in delta_jars():
        shutil.copyfile(jar, tmp_path / jar.name)
    monkeypatch.setenv("GEMLINE_JARS", str(tmp_path))
    return tmp_path


def test_a_jar_of_other_content_is_refused(folder: Path) -> None:
    assert [jar.parent for jar in delta_jars()] == [folder, folder]
    changed = folder / jar_names()[1]
    changed.write_bytes(changed.read_bytes() + b"more")
    with pytest.raises(UserError, match=f"{changed} has SHA-256 .*: remove it"):
        delta_jars()


def test_a_repository_that_does_not_answer_is_a_temporary_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etl.jars.FETCH_SECONDS", 0.01)
    with pytest.raises(TemporaryError, match=r"\(no answer within 0.01 seconds\): put io.delta_"):
        fetch(tmp_path / "jars")
    assert not (tmp_path / "jars").exists()
