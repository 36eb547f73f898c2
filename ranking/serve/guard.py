"""What the service turns away before it looks at it; how long it took for the rest."""

import time

from fastapi.responses import JSONResponse
from prometheus_client import Histogram
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ranking.serve.worker import Worker

SECONDS = Histogram(
    "gemline_seconds", "From the arrival of a request to its answer", ("route", "status"),
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2),
)  # fmt: skip


class Guard:
    """Stands before the routes of a worker."""

    def __init__(self, app: ASGIApp, worker: Worker) -> None:
        self.app, self.worker = app, worker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or let the routes answer, and count the seconds that it took."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def counted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        answer = refusal(self.worker, scope) or self.app
        try:
            await answer(scope, receive, counted)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            SECONDS.labels(route, status).observe(time.perf_counter() - began)


def refusal(worker: Worker, scope: Scope) -> JSONResponse | None:
    """Why a request is not looked at, if it is not."""
    if scope["method"] != "POST":
        return None
    length, most = Headers(scope=scope).get("content-length"), worker.settings.most_bytes
    if length is None:
        return told(411, "a request with a body tells its length")
    if int(length) > most:
        return told(413, f"a body of {int(length):,} bytes; at most {most:,}")
    if worker.waiting >= worker.settings.most_waiting:
        sentence = f"{worker.waiting} requests wait already; ask again in a second"
        return told(429, sentence, {"retry-after": "1"})
    return None


def told(status: int, sentence: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """What is wrong, in one sentence."""
    return JSONResponse({"error": sentence}, status, headers)
