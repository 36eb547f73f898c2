"""The archive of Spark's classes is used if it exists, and a damaged one is ignored."""

import shlex
import subprocess
from pathlib import Path

import pytest

from etl.runtime.java import class_archive_options, class_archive_path


def test_the_class_archive_is_used_if_it_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a cache"))
    assert class_archive_options() == ()
    class_archive_path().parent.mkdir(parents=True)
    class_archive_path().touch()
    assert shlex.split(class_archive_options()[0]) == [
        f"-XX:SharedArchiveFile={class_archive_path()}"
    ]


def test_a_jvm_ignores_a_damaged_class_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    class_archive_path().parent.mkdir(parents=True)
    class_archive_path().write_bytes(b"no archive" * 1000)
    options = shlex.split(" ".join(class_archive_options()))
    process = subprocess.run(
        ["java", *options, "-version"], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0
    assert "warning" not in process.stdout + process.stderr
