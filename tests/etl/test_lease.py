"""One command at a time runs a step of a lake; a lease outlives no holder for long."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import dags.commands
import etl.commands
import features.commands
import ranking.commands
import training.commands
from etl.cli import LEASES, LakeArgs, configuration_of
from etl.errors import TemporaryError
from etl.tables import atomic_io, lease
from etl.tables.lease import NO_PROCESS, Holder, acquire, held, process_of
from gemline import main
from tests.conftest import FIRST

HOLD = (
    "import sys, time; from etl.tables.lease import held\nwith held({lake!r}, ['gem'], 'first'):\n"
)
HOLD += "    print('held', flush=True); time.sleep(60)"


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "lake")


def file_of(root: str, generation: int) -> Path:
    return Path(root, "_line", "leases", f"gem.{generation:08d}.json")


def by_another_machine(root: str, age: float) -> Holder:
    """The lease of a process elsewhere, which it renewed so many seconds ago."""
    then = datetime.now(UTC) - timedelta(seconds=age)
    found = Holder(
        command="gemline train gem", user="ann", machine="other", pid=1, process="elsewhere 1",
        token="theirs", since=then, renewed=then,
    )  # fmt: skip
    assert atomic_io.create_file(file_of(root, 1), found.model_dump_json())
    return found


def forked(work: Callable[[], bool], count: int) -> list[bool]:
    """What each of some processes returns that do the same work at once."""
    children = []
    for _ in range(count):
        child = os.fork()
        if not child:
            try:
                os._exit(int(work()))
            finally:
                os._exit(9)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert set(codes) <= {0, 1}
    return [code == 1 for code in codes]


def takes(root: str) -> bool:
    """Whether this process gets the lease; it keeps it until all others have tried."""
    try:
        acquire(root, "gem", "taker")
        time.sleep(1)
    except TemporaryError:
        return False
    return True


@pytest.fixture
def first(root: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lease of GEM."""
    code = HOLD.format(lake=root)
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout and child.stdout.readline() == "held\n"
    yield child
    child.kill()
    child.wait()


def test_a_second_command_is_told_who_runs_the_step_and_since_when(
    root: str, first: subprocess.Popen[str]
) -> None:
    expected = (
        rf"gem of .* by first of \w+ on .* \(process {first.pid}\), since {datetime.now(UTC):%Y}"
    )
    with pytest.raises(TemporaryError, match=expected), held(root, ["gem"], "second"):
        pass
    with held(root, ["ingest"], "another step"):
        pass


def test_the_lease_of_a_killed_process_is_free_at_once(
    root: str, first: subprocess.Popen[str]
) -> None:
    first.kill()
    first.wait()
    with held(root, ["gem"], "second"), pytest.raises(TemporaryError, match="by second"):
        acquire(root, "gem", "third")
    with held(root, ["gem"], "third"):
        pass
    assert len(list(Path(root, "_line", "leases").iterdir())) == 1


def test_a_lease_of_another_machine_holds_until_it_expires(root: str) -> None:
    theirs = by_another_machine(root, age=lease.EXPIRES_AFTER / 2)
    with pytest.raises(TemporaryError, match="gemline train gem of ann on other"):
        acquire(root, "gem", "mine")
    expired = theirs.renewed - timedelta(seconds=lease.EXPIRES_AFTER)
    file_of(root, 1).write_text(theirs.model_copy(update={"renewed": expired}).model_dump_json())
    assert acquire(root, "gem", "mine")


@pytest.mark.parametrize("expired", [True, False], ids=["expired", "never held"])
def test_one_of_many_takers_gets_it(root: str, expired: bool) -> None:
    if expired:
        by_another_machine(root, age=2 * lease.EXPIRES_AFTER)
    assert sum(forked(lambda: takes(root), 8)) == 1


def test_a_damaged_lease_holds_for_a_while_and_is_named(root: str) -> None:
    file = file_of(root, 1)
    atomic_io.write_text(file, "")
    with pytest.raises(TemporaryError, match=f"{file} is empty or damaged"):
        acquire(root, "gem", "mine")
    os.utime(file, (0, 0))
    assert acquire(root, "gem", "mine")


def test_a_lease_is_renewed_while_it_is_held(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEWED_EVERY", 0.05)
    with held(root, ["gem"], "mine"):
        begun = Holder.model_validate_json(file_of(root, 1).read_text())
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            now = Holder.model_validate_json(file_of(root, 1).read_text())
            if now.renewed > begun.renewed:
                break
            time.sleep(0.01)
    assert now.renewed > begun.renewed
    assert now == begun.model_copy(update={"renewed": now.renewed})
    assert Holder.model_validate_json(file_of(root, 1).read_text()).released


def test_a_process_that_lost_its_lease_ends(root: str, tmp_path: Path) -> None:
    """It slept so long that another has taken the lease over."""
    code = "from etl.tables import lease; lease.RENEWED_EVERY = 0.05\n" + HOLD.format(lake=root)
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout and child.stdout.readline() == "held\n"
    found = Holder.model_validate_json(file_of(root, 1).read_text())
    other = found.model_copy(update={"token": "theirs"})
    assert atomic_io.create_file(file_of(root, 2), other.model_dump_json())
    _, said = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGTERM and "the lease was lost" in said


def test_what_a_command_starts_runs_under_its_lease(root: str) -> None:
    code = f"from etl.tables.lease import held\nwith held({root!r}, ['gem'], 'inner'): print('in')"
    with held(root, ["gem"], "outer"):
        inside = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        with held(root, ["gem"], "the same process"):
            pass
        assert not Holder.model_validate_json(file_of(root, 1).read_text()).released
    assert inside.stdout == "in\n", inside.stderr


def test_what_a_command_started_ends_when_the_command_is_killed(root: str) -> None:
    """Else it would go on without a lease, beside the next holder."""
    inner = HOLD.format(lake=root).replace("'held'", "__import__('os').getpid()")
    outer = "import subprocess, sys\nfrom etl.tables.lease import held\n"
    outer += (
        f"with held({root!r}, ['gem'], 'outer'): subprocess.run([sys.executable, '-c', {inner!r}])"
    )
    child = subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE, text=True)
    assert child.stdout
    started = int(child.stdout.readline())
    child.kill()
    child.wait()
    assert child.stdout.read() == ""  # until nobody can write to it any more
    with held(root, ["gem"], "next"):
        assert process_of(started) == NO_PROCESS


READ_ONLY = {
    "etl quarantine", "etl told", "etl pin", "etl unpin", "features check", "train baseline",
    "train evaluate", "train rebuild", "train lawcurve", "train health", "rank replay",
    "rank store", "rank serve", "report", "explain", "airflow",
}  # fmt: skip


def test_every_command_that_changes_a_lake_has_a_lease() -> None:
    """Those named here write nothing, single files of their own, or take leases inside."""
    without = set()
    for folder in (etl, features, training, ranking, dags):
        for group, commands in folder.commands.COMMANDS.items():
            each = {group: commands} if callable(commands) else commands
            for name, command in each.items():
                if issubclass(configuration_of(command), LakeArgs) and command not in LEASES:
                    without.add(name if callable(commands) else f"{group} {name}")
    assert without == READ_ONLY


def started(words: list[str], root: str, step: str) -> subprocess.Popen[bytes]:
    """A command in a process of its own that has taken a lease."""
    child = subprocess.Popen(
        [sys.executable, "-m", "gemline", *words], start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not list(Path(root, "_line", "leases").glob(f"{step}.*.json")):
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    return child


@pytest.mark.parametrize("step", ["gem", "run"])
def test_a_second_trainer_and_a_second_run_are_refused(
    root: str, spec_path: Path, capsys: pytest.CaptureFixture[str], step: str
) -> None:
    where = ["--spec", str(spec_path), "--lake", root]
    words = ["train", "gem", *where] if step == "gem" else ["run", *where, "--raw", root]
    days = ["--days", f"{FIRST}:{FIRST + timedelta(days=3)}"]
    child = started([*words, *days], root, step)
    try:
        os.killpg(child.pid, signal.SIGSTOP)
        assert main([*words, *days]) == 75
        said = capsys.readouterr().err
        assert f"{step} of {root} is already being run by gemline" in said
        assert f"(process {child.pid}), since" in said
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
