"""Atomic writes: files and folders are never partially written after a power loss or a kill.

A power loss is simulated by what a disk may do: content that was not fsynced is lost (the file is
truncated), and a name that was not fsynced in its folder may be lost.
"""

import functools
import itertools
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from etl.tables import atomic_io, step_state


class Disk:
    """What survives a power loss: files whose content and folders whose names were fsynced."""

    def __init__(self) -> None:
        self.files: set[int] = set()
        self.names: dict[int, dict[str, int]] = {}

    def fsync(self, descriptor: int) -> None:
        inode = os.fstat(descriptor).st_ino
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            self.names[inode] = {entry.name: entry.inode() for entry in os.scandir(descriptor)}
        else:
            self.files.add(inode)

    def lose_power(self, folder: Path) -> None:
        """Truncate files whose content was not fsynced; fail where a name may be lost."""
        safe = self.names.get(folder.stat().st_ino, {})
        for path in folder.iterdir():
            assert safe.get(path.name) == path.stat().st_ino, f"{path} may be lost"
            if path.is_dir():
                self.lose_power(path)
            elif path.stat().st_ino not in self.files:
                path.write_bytes(b"")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """A disk that records the fsyncs of this process."""
    disk, real_fsync = Disk(), os.fsync

    def fsync(descriptor: int) -> None:
        real_fsync(descriptor)
        disk.fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return disk


def test_written_files_and_folders_survive_a_power_loss(tmp_path: Path, disk: Disk) -> None:
    atomic_io.write_text(tmp_path / "new" / "pointer.json", "old")
    atomic_io.write_text(tmp_path / "new" / "pointer.json", "new")
    assert atomic_io.create_if_absent(tmp_path / "lease.json", "mine")
    staging = atomic_io.staging_folder(tmp_path / "rankers" / "v1")
    (staging / "parts").mkdir()
    (staging / "parts" / "a.onnx").write_text("program")
    atomic_io.publish_folder(staging, tmp_path / "rankers" / "v1")
    disk.lose_power(tmp_path)
    assert (tmp_path / "new" / "pointer.json").read_text() == "new"
    assert (tmp_path / "lease.json").read_text() == "mine"
    assert (tmp_path / "rankers" / "v1" / "parts" / "a.onnx").read_text() == "program"


def is_killed_at(call: int, work: Callable[[], None]) -> bool:
    """Run `work` in a process that is killed before its `call`-th fsync or rename.

    Returns whether it was killed, that is, whether it made that many calls.
    """
    child = os.fork()
    if not child:
        counter = itertools.count()

        def counting(real: Callable[..., object]) -> Callable[..., object]:
            def counted(*arguments: object) -> object:
                if next(counter) == call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments)

            return counted

        try:
            for name in ("fsync", "rename", "replace"):
                setattr(os, name, counting(getattr(os, name)))
            work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_a_kill_at_any_step_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    file, texts = tmp_path / "pointer.json", set()
    for call in range(20):
        atomic_io.write_text(file, "old")
        if not is_killed_at(call, lambda: atomic_io.write_text(file, "new")):
            break
        texts.add(file.read_text())
    assert texts == {"new", "old"} and file.read_text() == "new"


def publish(folder: Path, text: str) -> None:
    staging = atomic_io.staging_folder(folder)
    for name in "ab":
        (staging / name).write_text(text)
    atomic_io.publish_folder(staging, folder)


def test_a_kill_at_any_step_leaves_a_complete_folder_or_none(tmp_path: Path) -> None:
    states = []
    for call in range(20):
        folder = tmp_path / f"v{call}"
        if not is_killed_at(call, functools.partial(publish, folder, "new")):
            break
        states.append([(folder / name).read_text() for name in "ab"] if folder.exists() else [])
    assert [] in states and ["new", "new"] in states
    assert all(state in ([], ["new", "new"]) for state in states)


def test_an_existing_folder_is_never_replaced(tmp_path: Path) -> None:
    publish(tmp_path / "v1", "old")
    for call in range(20):
        is_killed = is_killed_at(call, functools.partial(publish, tmp_path / "v1", "new"))
        assert [(tmp_path / "v1" / name).read_text() for name in "ab"] == ["old", "old"]
        if not is_killed:
            break


def test_one_of_many_processes_creates_a_file(tmp_path: Path) -> None:
    children = []
    for number in range(8):
        child = os.fork()
        if not child:
            os._exit(0 if atomic_io.create_if_absent(tmp_path / "lease", f"{number}") else 1)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert sorted(codes) == [0] + [1] * 7
    assert (tmp_path / "lease").read_text() == str(codes.index(0))


def test_temporary_folders_of_killed_runs_are_removed_after_a_day(tmp_path: Path) -> None:
    old, fresh = (atomic_io.staging_folder(tmp_path / "v1") for _ in range(2))
    os.utime(old, (0, 0))
    atomic_io.write_text(tmp_path / "one.json", "{}")
    assert not old.exists() and fresh.exists()


@pytest.mark.parametrize("content", ["", "{", '{"run": 3}'])
def test_a_damaged_pin_or_step_state_is_ignored_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    lake = str(tmp_path)
    for name in ("one", "two"):
        step_state.pin_versions(lake, name, {"events": 1})
        step_state.write_step_state(lake, name, "inputs", 1.0)
    pin = next(p for p in (tmp_path / "_pipeline" / "pins").iterdir() if '"one"' in p.read_text())
    state = tmp_path / "_pipeline" / "steps" / "one.json"
    for file in (pin, state):
        file.write_text(content)
    assert [pin.run_id for pin in step_state.read_pins(lake)] == ["two"]
    assert step_state.read_step_state(lake, "one") is None
    assert step_state.read_step_state(lake, "two") is not None
    assert [name for name, _ in step_state.step_durations(lake)] == ["two"]
    assert str(pin) in caplog.text and str(state) in caplog.text
