"""Laws of the archive of Spark's classes: it is used where there is one, and never in the way."""

import shlex
import subprocess
from pathlib import Path

import pytest

from etl.java import archive_options, class_archive


def test_an_archive_is_used_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a cache"))
    assert archive_options() == ()
    class_archive().parent.mkdir(parents=True)
    class_archive().touch()
    assert shlex.split(archive_options()[0]) == [f"-XX:SharedArchiveFile={class_archive()}"]


def test_a_damaged_archive_stops_no_jvm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    class_archive().parent.mkdir(parents=True)
    class_archive().write_bytes(b"no archive" * 1000)
    options = shlex.split(" ".join(archive_options()))
    done = subprocess.run(["java", *options, "-version"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "warning" not in done.stdout + done.stderr
