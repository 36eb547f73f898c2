"""Leases: of a step of a lake one command runs at a time, whatever machine it runs on.

A lease is a file STEP.GENERATION.json below `_line/leases` of the lake. Whoever creates the next
generation holds the lease: on a disk a file is created by one process alone (O_EXCL), in an object
store by one request alone (If-None-Match). The holder renews its own file, nobody else writes to
it. A lease is free when it was released, when its process is known to have ended, or when it was
not renewed for EXPIRES_AFTER seconds; clocks of machines have to agree within half of that.
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
from etl.spec.base import Strict
from etl.tables import atomic_io
from etl.tables.place import Place, listed, place, text_of

FOLDER = "_line", "leases"
EXPIRES_AFTER = 120.0  # seconds
RENEWED_EVERY = 20.0
INHERITED = "GEMLINE_LEASES"  # tokens of leases that processes which this one starts work under
NO_PROCESS = ""
log = logging.getLogger(__name__)


class Holder(Strict):
    """Who holds a lease; `process` tells a process of this machine from any other."""

    command: str
    user: str
    machine: str
    pid: int
    process: str
    token: str
    since: datetime
    renewed: datetime
    released: bool = False

    def __str__(self) -> str:
        """As a message names it."""
        since = f"{self.since:%Y-%m-%d %H:%M:%S} UTC"
        return (
            f"{self.command} of {self.user} on {self.machine} (process {self.pid}), since {since}"
        )

    @property
    def is_free(self) -> bool:
        """Whether another command may take the lease."""
        age = (datetime.now(UTC) - self.renewed).total_seconds()
        return self.released or age > EXPIRES_AFTER or _has_ended(self.pid, self.process)


@dataclass
class Lease:
    """A lease that this process holds, under one generation of its file."""

    lake: str
    step: str
    holder: Holder
    generation: int
    _released: threading.Event = field(default_factory=threading.Event)

    def renew_until_released(self) -> None:
        """Renew it again and again; where another command has taken it, end this process."""
        written = time.monotonic()
        while not self._released.wait(RENEWED_EVERY):
            try:
                if _newest(self.lake, self.step) != (self.generation, self.holder.token):
                    break
                self._write(renewed=datetime.now(UTC))
                written = time.monotonic()
            except Exception:  # a store that does not answer may do so again
                if time.monotonic() - written > EXPIRES_AFTER:
                    break
        else:
            return
        _end_process(f"{self.step} of {self.lake}: the lease was lost")

    def release(self, renewing: threading.Thread) -> None:
        """Let others take it."""
        self._released.set()
        renewing.join()
        try:
            if _newest(self.lake, self.step) == (self.generation, self.holder.token):
                self._write(released=True)
        except Exception as error:  # what was done under it is done
            log.warning("%s of %s is not released but expires: %s", self.step, self.lake, error)

    def _write(self, **changes: object) -> None:
        self.holder = self.holder.model_copy(update=changes)
        path = _path(self.lake, self.step, self.generation)
        atomic_io.write_text(path, self.holder.model_dump_json())


@contextmanager
def held(lake: str, steps: Sequence[str], command: str) -> Iterator[None]:
    """Hold the leases of some steps of a lake while inside; processes started inside share them.

    Raises TemporaryError where another command holds one of them; says which, and since when.
    """
    with ExitStack() as leases:
        for step in steps:
            leases.enter_context(_held(lake, step, command))
        yield


@contextmanager
def _held(lake: str, step: str, command: str) -> Iterator[None]:
    inherited = os.environ.get(INHERITED, "")
    lease = acquire(lake, step, command, inherited.split())
    if isinstance(lease, Holder):
        with _ending_with(lease, f"{step} of {lake}"):
            yield
        return
    renewing = threading.Thread(target=lease.renew_until_released, daemon=True)
    renewing.start()
    os.environ[INHERITED] = f"{inherited} {lease.holder.token}"
    try:
        yield
    finally:
        os.environ[INHERITED] = inherited
        lease.release(renewing)


@contextmanager
def _ending_with(holder: Holder, what: str) -> Iterator[None]:
    """End this process if the one that started it, and holds its lease, ends meanwhile."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(1):
            if _has_ended(holder.pid, holder.process):
                _end_process(f"{what}: the process {holder.pid} that holds the lease has ended")

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _end_process(reason: str) -> None:
    print(f"{reason}; this process ends, too", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)


def acquire(lake: str, step: str, command: str, inherited: Sequence[str] = ()) -> Lease | Holder:
    """The lease of a step, or the holder where that is a process which has started this one.

    Raises TemporaryError where another command holds it.
    """
    now = datetime.now(UTC)
    holder = Holder(
        command=command, user=_user(), machine=platform.node(), pid=os.getpid(),
        process=process_of(os.getpid()), token=uuid.uuid4().hex, since=now, renewed=now,
    )  # fmt: skip
    while True:
        generation, token = _newest(lake, step)
        found = holder_of(lake, step, generation) if generation else None
        if found and token in inherited and not found.released:
            return found
        if found and not found.is_free:
            raise TemporaryError(
                f"{step} of {lake} is already being run by {found}. Run the same command again "
                "when it has ended"
            )
        mine = _path(lake, step, generation + 1)
        created = atomic_io.create_file(mine, holder.model_dump_json())
        if _newest(lake, step) == (generation + 1, holder.token):
            _remove_older(lake, step, generation + 1)
            return Lease(lake, step, holder, generation + 1)
        if created:  # of an old generation: others have held it meanwhile
            mine.unlink(missing_ok=True)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for the user's number
        return str(os.getuid())


def holder_of(lake: str, step: str, generation: int) -> Holder | None:
    """Who has written a generation of a lease; None where the file is gone.

    Of a file that cannot be read somebody unknown, who has renewed it when it was written.
    """
    path = _path(lake, step, generation)
    text = text_of(path)
    if text is None:
        return None
    try:
        return Holder.model_validate_json(text)
    except ValidationError:
        written = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        return Holder(
            command=f"a command that has just begun ({path} is empty or damaged)", user="?",
            machine="?", pid=0, process=NO_PROCESS, token="", since=written, renewed=written,
        )  # fmt: skip


def process_of(pid: int) -> str:
    """What tells a process from all others that ever ran: boot, PID namespace and start time."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").readlink()
        fields = _stat_of(pid)
    except OSError:
        return NO_PROCESS
    return NO_PROCESS if fields[0] == "Z" else f"{boot} {namespace} {fields[19]}"


def _stat_of(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; the name before it may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _has_ended(pid: int, process: str) -> bool:
    """Whether a process is known to have ended: it ran here, and runs no more."""
    here = process_of(os.getpid())
    return process[: process.rfind(" ")] == here[: here.rfind(" ")] and process_of(pid) != process


def _newest(lake: str, step: str) -> tuple[int, str]:
    """The newest generation of a lease, and its token; 0 where there never was one."""
    generation = max(_generations(lake, step), default=0)
    found = holder_of(lake, step, generation) if generation else None
    return generation, found.token if found else ""


def _generations(lake: str, step: str) -> list[int]:
    paths = listed(place(lake, *FOLDER), f"{_file_name(step)}.*.json")
    return [int(path.name.split(".")[-2]) for path in paths]


def _remove_older(lake: str, step: str, generation: int) -> None:
    for older in _generations(lake, step):
        if older < generation:
            _path(lake, step, older).unlink(missing_ok=True)


def _path(lake: str, step: str, generation: int) -> Place:
    return place(lake, *FOLDER, f"{_file_name(step)}.{generation:08d}.json")


def _file_name(step: str) -> str:
    return quote(step, safe="").replace(".", "%2E")
