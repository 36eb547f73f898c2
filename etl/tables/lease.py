"""Leases: at most one command at a time runs a step of a lake, across all machines.

A lease is a file STEP.GENERATION.json below `_pipeline/leases` of the lake. The process that
creates the next generation holds the lease: only one can succeed (by a hard link on a disk, by
If-None-Match in an object store). Only the holder writes to its file, to renew the lease. A lease
is free when it was released, when its process is known to have ended, or when it was not renewed
for LEASE_TIMEOUT_SECONDS; the clocks of machines must agree within half of that.
"""

import getpass
import logging
import os
import platform
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from pydantic import ValidationError

from etl.errors import TemporaryError
from etl.spec.base import StrictModel
from etl.tables import atomic_io
from etl.tables.uri import StoragePath, list_matching, read_text_if_exists, resolve_uri

LEASES_FOLDER = "_pipeline", "leases"
LEASE_TIMEOUT_SECONDS = 120.0
RENEWAL_INTERVAL_SECONDS = 20.0
INHERITED_LEASES_ENV = "GEMLINE_LEASES"  # tokens of the leases that child processes share
UNKNOWN_PROCESS = ""
log = logging.getLogger(__name__)


class LeaseHolder(StrictModel):
    """The content of a lease file: who holds the lease, and since when."""

    command: str
    user: str
    machine: str
    pid: int
    process_identity: str
    """See `process_identity`; empty if unknown."""
    token: str
    """Random id of this acquisition."""
    acquired_at: datetime
    renewed_at: datetime
    released: bool = False

    def __str__(self) -> str:
        since = f"{self.acquired_at:%Y-%m-%d %H:%M:%S} UTC"
        return (
            f"{self.command} of {self.user} on {self.machine} (process {self.pid}), since {since}"
        )

    @property
    def is_free(self) -> bool:
        """Whether another command may take the lease."""
        age = (datetime.now(UTC) - self.renewed_at).total_seconds()
        return (
            self.released
            or age > LEASE_TIMEOUT_SECONDS
            or _is_terminated(self.pid, self.process_identity)
        )


@dataclass
class Lease:
    """A lease that this process holds, under one generation of its file."""

    lake: str
    step: str
    holder: LeaseHolder
    generation: int
    _release_event: threading.Event = field(default_factory=threading.Event)

    def renew_until_released(self) -> None:
        """Renew the lease until it is released; terminate this process if the lease is lost."""
        last_renewal = time.monotonic()
        while not self._release_event.wait(RENEWAL_INTERVAL_SECONDS):
            try:
                if _latest_generation(self.lake, self.step) != (self.generation, self.holder.token):
                    break
                self._write(renewed_at=datetime.now(UTC))
                last_renewal = time.monotonic()
            except Exception:  # the next attempt may succeed
                if time.monotonic() - last_renewal > LEASE_TIMEOUT_SECONDS:
                    break
        else:
            return
        _terminate_self(f"{self.step} of {self.lake}: the lease was lost")

    def release(self, renewal_thread: threading.Thread) -> None:
        """Stop renewing the lease and let others acquire it."""
        self._release_event.set()
        renewal_thread.join()
        try:
            if _latest_generation(self.lake, self.step) == (self.generation, self.holder.token):
                self._write(released=True)
        except Exception as error:  # the work is done; the lease will expire
            log.warning(
                "the lease of %s of %s was not released and will expire: %s",
                self.step, self.lake, error,
            )  # fmt: skip

    def _write(self, **changes: object) -> None:
        self.holder = self.holder.model_copy(update=changes)
        path = _lease_path(self.lake, self.step, self.generation)
        atomic_io.write_text(path, self.holder.model_dump_json())


@contextmanager
def hold_leases(lake: str, steps: Sequence[str], command: str) -> Iterator[None]:
    """Hold the leases of some steps of a lake; child processes share them.

    Raises TemporaryError if another command holds one of them, with its name and start time.
    """
    with ExitStack() as leases:
        for step in steps:
            leases.enter_context(_hold_lease(lake, step, command))
        yield


@contextmanager
def _hold_lease(lake: str, step: str, command: str) -> Iterator[None]:
    inherited = os.environ.get(INHERITED_LEASES_ENV, "")
    lease = acquire_lease(lake, step, command, inherited.split())
    if isinstance(lease, LeaseHolder):
        with _exit_with_holder(lease, f"{step} of {lake}"):
            yield
        return
    renewal_thread = threading.Thread(target=lease.renew_until_released, daemon=True)
    renewal_thread.start()
    os.environ[INHERITED_LEASES_ENV] = f"{inherited} {lease.holder.token}"
    try:
        yield
    finally:
        os.environ[INHERITED_LEASES_ENV] = inherited
        lease.release(renewal_thread)


@contextmanager
def _exit_with_holder(holder: LeaseHolder, description: str) -> Iterator[None]:
    """Terminate this process if the parent process that holds its lease ends."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(1):
            if _is_terminated(holder.pid, holder.process_identity):
                _terminate_self(
                    f"{description}: the process {holder.pid} that holds the lease has ended"
                )

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _terminate_self(reason: str) -> None:
    print(f"{reason}; terminating this process", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)


def acquire_lease(
    lake: str, step: str, command: str, inherited_tokens: Sequence[str] = ()
) -> Lease | LeaseHolder:
    """Acquire the lease of a step.

    Returns:
        The lease, or its holder if that is a parent process, which passed on its token.

    Raises:
        TemporaryError: Another command holds the lease.
    """
    now = datetime.now(UTC)
    holder = LeaseHolder(
        command=command,
        user=_current_user(),
        machine=platform.node(),
        pid=os.getpid(),
        process_identity=process_identity(os.getpid()),
        token=uuid.uuid4().hex,
        acquired_at=now,
        renewed_at=now,
    )
    while True:
        generation, token = _latest_generation(lake, step)
        current = read_holder(lake, step, generation) if generation else None
        if current and token in inherited_tokens and not current.released:
            return current
        if current and not current.is_free:
            raise TemporaryError(
                f"{step} of {lake} is already being run by {current}. Run the same command again "
                "when it has ended"
            )
        path = _lease_path(lake, step, generation + 1)
        created = atomic_io.create_if_absent(path, holder.model_dump_json())
        if _latest_generation(lake, step) == (generation + 1, holder.token):
            _remove_older_generations(lake, step, generation + 1)
            return Lease(lake, step, holder, generation + 1)
        if created:  # others have held later generations in the meantime
            path.unlink(missing_ok=True)


def _current_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for the user id
        return str(os.getuid())


def read_holder(lake: str, step: str, generation: int) -> LeaseHolder | None:
    """The holder in one generation of a lease; None if the file does not exist.

    For a damaged file, an unknown holder that renewed the lease when the file was written.
    """
    path = _lease_path(lake, step, generation)
    text = read_text_if_exists(path)
    if text is None:
        return None
    try:
        return LeaseHolder.model_validate_json(text)
    except ValidationError:
        written = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        return LeaseHolder(
            command=f"an unknown command ({path} is empty or damaged)",
            user="?",
            machine="?",
            pid=0,
            process_identity=UNKNOWN_PROCESS,
            token="",
            acquired_at=written,
            renewed_at=written,
        )


def process_identity(pid: int) -> str:
    """An identity that no other process ever has: boot, PID namespace and start time."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").readlink()
        fields = _read_process_stat(pid)
    except OSError:
        return UNKNOWN_PROCESS
    return UNKNOWN_PROCESS if fields[0] == "Z" else f"{boot} {namespace} {fields[19]}"


def _read_process_stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; the name before it may contain spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _is_terminated(pid: int, identity: str) -> bool:
    """Whether a process ran on this machine, in this PID namespace, and has ended."""
    own_host = process_identity(os.getpid()).rpartition(" ")[0]
    return identity.rpartition(" ")[0] == own_host and process_identity(pid) != identity


def _latest_generation(lake: str, step: str) -> tuple[int, str]:
    """The latest generation of a lease and its token; 0 if there has been none."""
    generation = max(_list_generations(lake, step), default=0)
    holder = read_holder(lake, step, generation) if generation else None
    return generation, holder.token if holder else ""


def _list_generations(lake: str, step: str) -> list[int]:
    paths = list_matching(resolve_uri(lake, *LEASES_FOLDER), f"{_file_name(step)}.*.json")
    return [int(path.name.split(".")[-2]) for path in paths]


def _remove_older_generations(lake: str, step: str, generation: int) -> None:
    for older in _list_generations(lake, step):
        if older < generation:
            _lease_path(lake, step, older).unlink(missing_ok=True)


def _lease_path(lake: str, step: str, generation: int) -> StoragePath:
    return resolve_uri(lake, *LEASES_FOLDER, f"{_file_name(step)}.{generation:08d}.json")


def _file_name(step: str) -> str:
    return quote(step, safe="").replace(".", "%2E")
