"""Only one command at a time runs a step of a lake; the lease of an ended holder expires soon."""

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import benchmarks.commands
import dags.commands
import etl.commands
import features.commands
import ranking.commands
import ranking.erasure
import training.commands
from dags.pipeline import latest_mature_split, pipeline_steps
from dags.steps import PipelinePaths
from etl.cli.runner import COMMAND_LEASES, LakeArgs, arguments_model
from etl.errors import TemporaryError, UserError
from etl.spec import load_spec
from etl.table_commands import TABLE_STEPS, score_leases
from etl.tables import atomic_io, lease
from etl.tables.lease import (
    UNKNOWN_PROCESS,
    LeaseHolder,
    acquire_lease,
    hold_leases,
    process_identity,
)
from etl.tables.schemas import table_registry
from gemline import COMMAND_GROUPS, main
from tests.conftest import FIRST

HOLD_LEASE = """
import time
from etl.tables.lease import hold_leases
with hold_leases({lake!r}, ["gem"], "first"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "lake")


def lease_file(root: str, generation: int) -> Path:
    return Path(root, "_pipeline", "leases", f"gem.{generation:08d}.json")


def read_lease(root: str, generation: int) -> LeaseHolder:
    return LeaseHolder.model_validate_json(lease_file(root, generation).read_text())


def write_lease_of_another_machine(root: str, age: float) -> LeaseHolder:
    """The lease of a process on another machine, renewed `age` seconds ago."""
    renewed_at = datetime.now(UTC) - timedelta(seconds=age)
    holder = LeaseHolder(
        command="gemline train gem", user="ann", machine="other", pid=1,
        process_identity="elsewhere 1", token="theirs", acquired_at=renewed_at,
        renewed_at=renewed_at,
    )  # fmt: skip
    assert atomic_io.create_if_absent(lease_file(root, 1), holder.model_dump_json())
    return holder


def run_in_processes(work: Callable[[], bool], count: int) -> list[bool]:
    """The results of `count` processes that run `work` at the same time, and end together."""
    barrier = multiprocessing.get_context("fork").Barrier(count)
    children = []
    for _ in range(count):
        child = os.fork()
        if not child:
            try:
                has_succeeded = work()
                barrier.wait(timeout=120)
                os._exit(int(has_succeeded))
            finally:
                os._exit(9)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert set(codes) <= {0, 1}
    return [code == 1 for code in codes]


def can_acquire(root: str) -> bool:
    """Whether this process acquires the lease; it keeps it until it ends."""
    try:
        acquire_lease(root, "gem", "competitor")
    except TemporaryError:
        return False
    return True


@pytest.fixture
def holder(root: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lease of the step `gem`."""
    code = HOLD_LEASE.format(lake=root)
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout and child.stdout.readline() == "held\n"
    yield child
    child.kill()
    child.wait()


def test_the_error_of_a_second_command_names_the_holder_and_its_start_time(
    root: str, holder: subprocess.Popen[str]
) -> None:
    since = rf"\(process {holder.pid}\), since {datetime.now(UTC):%Y}"
    message = rf"gem of .* by first of \w+ on .* {since}"
    with pytest.raises(TemporaryError, match=message), hold_leases(root, ["gem"], "second"):
        pass
    with hold_leases(root, ["ingest"], "another step"):
        pass


def test_the_lease_of_a_killed_process_is_free_at_once(
    root: str, holder: subprocess.Popen[str]
) -> None:
    holder.kill()
    holder.wait()
    with hold_leases(root, ["gem"], "second"), pytest.raises(TemporaryError, match="by second"):
        acquire_lease(root, "gem", "third")
    with hold_leases(root, ["gem"], "third"):
        pass
    assert len(list(Path(root, "_pipeline", "leases").iterdir())) == 1


def test_a_lease_of_another_machine_holds_until_it_expires(root: str) -> None:
    holder = write_lease_of_another_machine(root, age=lease.LEASE_TIMEOUT_SECONDS / 2)
    with pytest.raises(TemporaryError, match="gemline train gem of ann on other"):
        acquire_lease(root, "gem", "mine")
    expired = holder.renewed_at - timedelta(seconds=lease.LEASE_TIMEOUT_SECONDS)
    expired_holder = holder.model_copy(update={"renewed_at": expired})
    lease_file(root, 1).write_text(expired_holder.model_dump_json())
    assert acquire_lease(root, "gem", "mine")


@pytest.mark.parametrize("expired", [True, False], ids=["expired", "never held"])
def test_one_of_many_processes_acquires_a_free_lease(root: str, expired: bool) -> None:
    if expired:
        write_lease_of_another_machine(root, age=2 * lease.LEASE_TIMEOUT_SECONDS)
    assert sum(run_in_processes(lambda: can_acquire(root), 8)) == 1


def test_a_damaged_lease_is_held_until_it_expires(root: str) -> None:
    file = lease_file(root, 1)
    atomic_io.write_text(file, "")
    with pytest.raises(TemporaryError, match=f"{file} is empty or damaged"):
        acquire_lease(root, "gem", "mine")
    os.utime(file, (0, 0))
    assert acquire_lease(root, "gem", "mine")


def test_a_lease_is_renewed_while_it_is_held(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEWAL_INTERVAL_SECONDS", 0.05)
    with hold_leases(root, ["gem"], "mine"):
        acquired = read_lease(root, 1)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            renewed = read_lease(root, 1)
            if renewed.renewed_at > acquired.renewed_at:
                break
            time.sleep(0.01)
    assert renewed.renewed_at > acquired.renewed_at
    assert renewed == acquired.model_copy(update={"renewed_at": renewed.renewed_at})
    assert read_lease(root, 1).released


def test_a_process_that_lost_its_lease_terminates(root: str) -> None:
    """It was suspended so long that another process acquired the lease."""
    code = "from etl.tables import lease; lease.RENEWAL_INTERVAL_SECONDS = 0.05\n"
    code += HOLD_LEASE.format(lake=root)
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout and child.stdout.readline() == "held\n"
    other = read_lease(root, 1).model_copy(update={"token": "theirs"})
    assert atomic_io.create_if_absent(lease_file(root, 2), other.model_dump_json())
    _, errors = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGTERM and "the lease was lost" in errors


def test_child_processes_share_the_lease(root: str) -> None:
    code = "from etl.tables.lease import hold_leases\n"
    code += f"with hold_leases({root!r}, ['gem'], 'inner'): print('in')"
    with hold_leases(root, ["gem"], "outer"):
        child = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        with hold_leases(root, ["gem"], "the same process"):
            pass
        assert not read_lease(root, 1).released
    assert child.stdout == "in\n", child.stderr


def test_child_processes_terminate_when_the_holder_is_killed(root: str) -> None:
    """Otherwise they would continue without a lease, concurrently with the next holder."""
    inner = HOLD_LEASE.format(lake=root).replace('"held"', "__import__('os').getpid()")
    outer = "import subprocess, sys\nfrom etl.tables.lease import hold_leases\n"
    outer += f"with hold_leases({root!r}, ['gem'], 'outer'):\n"
    outer += f"    subprocess.run([sys.executable, '-c', {inner!r}])"
    parent = subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    child_pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    assert parent.stdout.read() == ""  # returns when the child has closed it, too
    with hold_leases(root, ["gem"], "next"):
        assert process_identity(child_pid) == UNKNOWN_PROCESS


READ_ONLY = {
    "etl quarantine", "etl table-info", "etl pin", "etl unpin", "features check",
    "train verify-batches", "train check-drift", "train importance", "features check-drift",
    "rank check-consistency", "rank off-policy", "rank materialize", "rank serve",
    "bench serving", "explain", "airflow", "manifests",
}  # fmt: skip


def test_every_command_that_changes_a_lake_has_a_lease() -> None:
    """Commands in READ_ONLY write nothing, write single files, or hold leases themselves."""
    without_lease = set()
    for package in (etl, features, training, ranking, dags, benchmarks):
        for group, commands in package.commands.COMMANDS.items():
            subcommands = {group: commands} if callable(commands) else commands
            for name, command in subcommands.items():
                if issubclass(arguments_model(command), LakeArgs) and command not in COMMAND_LEASES:
                    without_lease.add(name if callable(commands) else f"{group} {name}")
    assert without_lease == READ_ONLY


def test_maintenance_holds_the_lease_of_every_command_that_writes_tables(spec_path: Path) -> None:
    """Otherwise a vacuum deletes files that a running command has staged."""
    spec, paths = load_spec(spec_path), PipelinePaths(spec_path, "raw", "lake")
    split = latest_mature_split(spec, FIRST, FIRST + timedelta(days=9))
    tables = set(table_registry(spec))
    leases = set()
    for step in pipeline_steps(spec, paths, split):
        if tables & {name.partition("/")[0] for name in step.writes}:
            command = command_of(step.command)
            names = COMMAND_LEASES[command]
            leases |= {name.format(surface=step.surface) for name in names}
    assert leases == {*TABLE_STEPS, *score_leases(spec)}


def test_an_erasure_holds_the_lease_of_every_step_of_a_run(
    root: str, spec_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that read a table before the erasure would write rows of the users after it."""
    spec, paths = load_spec(spec_path), PipelinePaths(spec_path, "raw", root)
    split = latest_mature_split(spec, FIRST, FIRST + timedelta(days=9))
    held: set[str] = set()

    def stop_with_leases(*_: object) -> None:
        held.update(path.name.split(".")[0] for path in leases_folder.iterdir())
        raise UserError("enough")

    leases_folder = Path(root, "_pipeline", "leases")
    monkeypatch.setattr(ranking.erasure, "erase_users", stop_with_leases)
    assert main(["erase", "--spec", str(spec_path), "--lake", root, "--user", "u1"]) == 2
    for step in pipeline_steps(spec, paths, split):
        leases = COMMAND_LEASES.get(command_of(step.command), (step.command[1],))
        assert {name.format(surface=step.surface) for name in leases} <= held, step.name


def command_of(words: Sequence[str]) -> Callable[[Any], None]:
    """The function of a command line."""
    commands = importlib.import_module(COMMAND_GROUPS[words[0]][0]).COMMANDS[words[0]]
    command: Callable[[Any], None] = commands if callable(commands) else commands[words[1]]
    return command


def start_command(command: list[str], root: str, step: str) -> subprocess.Popen[bytes]:
    """A command in its own process that has acquired a lease."""
    child = subprocess.Popen(
        [sys.executable, "-m", "gemline", *command], start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not list(Path(root, "_pipeline", "leases").glob(f"{step}.*.json")):
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    return child


@pytest.mark.parametrize("step", ["gem", "run"])
def test_a_second_trainer_and_a_second_run_are_refused(
    root: str, spec_path: Path, capsys: pytest.CaptureFixture[str], step: str
) -> None:
    flags = ["--spec", str(spec_path), "--lake", root]
    flags += ["--days", f"{FIRST}:{FIRST + timedelta(days=3)}"]
    command = ["train", "gem", *flags] if step == "gem" else ["run", *flags, "--raw", root]
    child = start_command(command, root, step)
    try:
        os.killpg(child.pid, signal.SIGSTOP)
        assert main(command) == 75
        message = capsys.readouterr().err
        assert f"{step} of {root} is already being run by gemline" in message
        assert f"(process {child.pid}), since" in message
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
