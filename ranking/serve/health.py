"""Health of the service, answered on a port of its own, apart from the loops that rank.

Each worker writes its state into a folder once a second; the server of a thread reads all of them.
"""

import asyncio
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from etl.errors import UserError
from ranking.serve.bodies import StateBody
from ranking.serve.protocol import LimitedProtocol
from ranking.serve.settings import Limits

if TYPE_CHECKING:  # the process that starts workers does not load what they rank with
    from ranking.serve.worker import Worker

REPORT_SECONDS = 1.0
STALE_SECONDS = 15.0  # after which a worker that reports nothing counts as stuck
LIMITS = Limits(connections=32, receive_seconds=5.0)


async def report_state(worker: "Worker") -> None:
    """Write what a worker serves with into its status folder, again and again until cancelled."""
    folder = worker.settings.status_folder
    if folder is None:
        return
    path = folder / f"worker-{os.getpid()}.json"
    try:
        while True:
            beside = path.with_suffix(".new")
            beside.write_text(worker.state.model_dump_json())
            beside.replace(path)
            await asyncio.sleep(REPORT_SECONDS)
    finally:
        path.unlink(missing_ok=True)


def health(folder: Path) -> dict[str, Any]:
    """What the workers of a folder serve with, and whether all are well.

    `status` is `ok`, `degraded` where a worker or what it serves has a fault, `down` where no
    worker has reported lately. What a killed worker has left is not counted.
    """
    workers = []
    for path in sorted(folder.glob("worker-*.json")):
        pid = int(path.stem.partition("-")[2])
        with suppress(FileNotFoundError):  # it has just ended
            age, text = time.time() - path.stat().st_mtime, path.read_text()
            if Path(f"/proc/{pid}").exists():
                state = StateBody.model_validate_json(text).model_dump()
                workers.append({"pid": pid, "is_stuck": age > STALE_SECONDS} | state)
    running = [one for one in workers if not one["is_stuck"]]
    faults = [one for one in running if one["ranker_faults"] or one["features_fault"]]
    is_ok = not faults and len(running) == len(workers)
    status = ("ok" if is_ok else "degraded") if running else "down"
    return {"status": status, "workers": workers}


def health_app(folder: Path) -> Starlette:
    """The application that answers `/health` of the workers of a folder."""

    async def answer(_: Request) -> Response:
        found = health(folder)
        return JSONResponse(found, 503 if found["status"] == "down" else 200)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[dict[str, Any]]:
        yield {"limits": LIMITS}

    return Starlette(routes=[Route("/health", answer)], lifespan=lifespan)


@contextmanager
def health_server(host: str, port: int, folder: Path) -> Iterator[int]:
    """Answer `/health` on a port while the block runs; yields it. UserError where it is taken."""
    try:
        listening = socket.create_server((host, port))
    except OSError as error:
        raise UserError(
            f"{host}:{port} cannot be listened on ({error.strerror}): name another --health-port"
        ) from None
    config = uvicorn.Config(
        health_app(folder), http=LimitedProtocol, ws="none", access_log=False, log_level="warning"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        listening.close()
