"""Runs the worker processes of the service, limits their connections, and answers health checks.

* `run_server` starts the workers and stops them once their requests are answered.
* `LimitedProtocol` adds to uvicorn what it lacks: bounds on the number of connections, on the size
  and time of headers, on the time of bodies, and on clients that do not read their response.
* `health_server` answers `/health` on a separate port, in a separate thread from the event loops
  that rank. Each worker writes its status into a folder once a second; the server reads them all.
"""

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from etl.errors import UserError
from ranking.serving.schemas import WorkerStatus
from ranking.serving.settings import SETTINGS_VARIABLE, ServiceLimits, Settings

if TYPE_CHECKING:  # the parent process does not load ranking dependencies
    from ranking.serving.worker import Worker

log = logging.getLogger("uvicorn.error")
MAX_HEADER_BYTES = 64 << 10
CLOSE_DELAY_SECONDS = 1.0  # lets clients read the error response
STATUS_INTERVAL_SECONDS = 1.0
UNRESPONSIVE_SECONDS = 15.0  # age of the status of an unresponsive worker
HEALTH_LIMITS = ServiceLimits(max_connections=32, receive_timeout_seconds=5.0)


class LimitedProtocol(HttpToolsProtocol):
    """A connection of a server whose lifespan state has `limits`.

    One timer at a time runs: until the headers are complete, until the body is complete, or until
    the response is sent. `header_bytes` counts the bytes of headers that are not complete yet.
    """

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config, server_state, app_state, _loop)
        self.limits: ServiceLimits = app_state["limits"]
        self.timer: asyncio.TimerHandle | None = None
        self.header_bytes: int | None = 0
        self.is_rejected = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first headers, or refuse the connection if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > 2 * self.limits.max_connections:  # too many to answer
            transport.abort()
        elif len(self.connections) > self.limits.max_connections:
            self._reject(503, "too many open connections; retry in a second")
        else:
            self._start_timer(self.limits.receive_timeout_seconds, self._on_header_timeout)

    def data_received(self, data: bytes) -> None:
        """Parse the data, unless the headers are too large."""
        if self.is_rejected:
            return
        if self.header_bytes is not None:
            self.header_bytes += len(data)
            if self.timer is None:
                self._start_timer(self.limits.receive_timeout_seconds, self._on_header_timeout)
        super().data_received(data)
        if self.header_bytes is not None and self.header_bytes > MAX_HEADER_BYTES:
            self._reject(431, f"headers are at most {MAX_HEADER_BYTES:,} bytes")

    def on_headers_complete(self) -> None:
        """Start the request, and wait for its body."""
        self.header_bytes = None
        self._start_timer(
            self.limits.receive_timeout_seconds + CLOSE_DELAY_SECONDS, self._on_body_timeout
        )
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Stop the timer: the request is complete."""
        self.header_bytes = 0
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Drop a body that was not read, and wait until the response is sent."""
        super().on_response_complete()
        if self.cycle.response_complete:
            self.cycle.body = bytearray()
        if self.timer is None and self.transport.get_write_buffer_size():
            self._start_timer(self.limits.receive_timeout_seconds, self._on_write_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_timer()
        super().connection_lost(exc)

    def _on_header_timeout(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            timeout = self.limits.receive_timeout_seconds
            self._reject(408, f"the headers of the request did not arrive within {timeout:g} s")
        else:  # an earlier request on this connection is still being answered
            self._start_timer(self.limits.receive_timeout_seconds, self._on_header_timeout)

    def _on_body_timeout(self) -> None:
        self.transport.abort()

    def _on_write_timeout(self) -> None:
        self.timer = None
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        elif self.header_bytes:
            self._start_timer(self.limits.receive_timeout_seconds, self._on_header_timeout)

    def _reject(self, status: int, message: str) -> None:
        """Answer with an error, read no further, and close after a moment."""
        self.is_rejected = True
        body = json.dumps({"error": message}).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.write_eof()
        self._start_timer(CLOSE_DELAY_SECONDS, self.transport.abort)

    def _start_timer(self, seconds: float, callback: Callable[[], object]) -> None:
        self._stop_timer()
        self.timer = self.loop.call_later(seconds, callback)

    def _stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


async def report_status(worker: "Worker") -> None:
    """Write a worker's status into its status folder periodically, until cancelled.

    A status that cannot be written, for example because the disk is full, is logged and skipped.
    """
    folder = worker.settings.status_folder
    if folder is None:
        return
    path = folder / f"worker-{os.getpid()}.json"
    try:
        while True:
            try:
                temporary = path.with_suffix(".new")
                temporary.write_text(worker.status.model_dump_json())
                temporary.replace(path)
            except Exception as error:
                log.error("the status of the worker was not written: %r", error)
            await asyncio.sleep(STATUS_INTERVAL_SECONDS)
    finally:
        path.unlink(missing_ok=True)


def health_status(status_folder: Path, num_workers: int) -> dict[str, Any]:
    """The status of the service and of each worker that reports into a folder.

    `status` is `ok`; `degraded` if fewer than `num_workers` are responsive, or one failed to load a
    ranker or feature store; `down` if no worker is responsive. Files of killed workers are ignored.
    """
    workers = []
    for path in sorted(status_folder.glob("worker-*.json")):
        pid = int(path.stem.partition("-")[2])
        with suppress(FileNotFoundError):  # the worker has just ended
            age, text = time.time() - path.stat().st_mtime, path.read_text()
            if Path(f"/proc/{pid}").exists():
                status = WorkerStatus.model_validate_json(text).model_dump()
                workers.append({"pid": pid, "is_unresponsive": age > UNRESPONSIVE_SECONDS} | status)
    responsive = [worker for worker in workers if not worker["is_unresponsive"]]
    has_errors = any(w["ranker_errors"] or w["feature_store_error"] for w in responsive)
    if not responsive:
        overall = "down"
    elif has_errors or len(responsive) < max(num_workers, len(workers)):
        overall = "degraded"
    else:
        overall = "ok"
    return {"status": overall, "workers": workers}


def health_app(status_folder: Path, num_workers: int) -> Starlette:
    """The application that answers `/health` for the workers that report into a folder."""

    async def health(_: Request) -> Response:
        status = health_status(status_folder, num_workers)
        return JSONResponse(status, 503 if status["status"] == "down" else 200)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[dict[str, Any]]:
        yield {"limits": HEALTH_LIMITS}

    return Starlette(routes=[Route("/health", health)], lifespan=lifespan)


@contextmanager
def health_server(host: str, port: int, status_folder: Path, num_workers: int) -> Iterator[int]:
    """Answer `/health` in a thread while the block runs; yields the port.

    Raises:
        UserError: The address cannot be listened on.
    """
    listener = _listen(host, port, "--health-port or --health-host")
    config = uvicorn.Config(
        health_app(status_folder, num_workers),
        http=LimitedProtocol,
        ws="none",
        access_log=False,
        log_level="warning",
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def require_free_port(host: str, port: int) -> None:
    """Raise UserError if an address cannot be listened on; uvicorn would exit with another code."""
    _listen(host, port, "--port or --host").close()


def _listen(host: str, port: int, flags: str) -> socket.socket:
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise UserError(
            f"cannot listen on {host}:{port} ({error.strerror}): choose another {flags}"
        ) from None


UVICORN_OPTIONS: dict[str, Any] = {
    "http": LimitedProtocol,
    "ws": "none",
    "access_log": False,
    "server_header": False,
    "timeout_graceful_shutdown": 30,
}


def run_server(settings: Settings, host: str, port: int, health_address: tuple[str, int]) -> None:
    """Serve until SIGTERM or SIGINT; open requests are answered first, and the exit code is 0.

    Args:
        settings: Settings of the workers.
        host: The address to listen on.
        port: The port to listen on.
        health_address: Host and port on which `/health` of all workers is answered.
    """
    require_free_port(host, port)
    signal.signal(signal.SIGTERM, _exit_gracefully)
    if settings.use_compiled:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # a worker ranks on one core
    with tempfile.TemporaryDirectory(prefix="gemline-serve-") as folder:
        metrics, status = Path(folder, "metrics"), Path(folder, "status")
        metrics.mkdir()
        status.mkdir()
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(metrics)
        settings = settings.model_copy(update={"status_folder": status})
        os.environ[SETTINGS_VARIABLE] = settings.model_dump_json()
        with health_server(*health_address, status, settings.workers) as health_port:
            log.warning("health checks on http://%s:%d/health", health_address[0], health_port)
            uvicorn.run(
                "ranking.serving.app:create_app",
                factory=True,
                host=host,
                port=port,
                workers=settings.workers,
                **UVICORN_OPTIONS,
            )


def _exit_gracefully(*_: object) -> None:
    """Handle the SIGTERM that uvicorn raises again after it has stopped."""
    sys.exit(0)
