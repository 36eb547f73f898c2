"""What a worker lets in: requests within their bytes, their time, their cost and their rights."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from prometheus_client import Histogram
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ranking.serve.access import access_refusal
from ranking.serve.bodies import error_response
from ranking.serve.settings import Limits

T = TypeVar("T")
REQUEST_COST = 100  # candidates that cost as much as a request does beside its own
RETRY = {"retry-after": "1"}
SECONDS = Histogram(
    "gemline_seconds", "From the arrival of a request to its answer", ("route", "status"),
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2),
)  # fmt: skip


class WorkQueue:
    """Runs work one piece after the other, and refuses more than can be done in time."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.cost = self.waiting = 0
        self._turn = asyncio.Lock()

    @contextmanager
    def admitted(self, candidates: int) -> Iterator[None]:
        """Counts what waits, until the block ends: work that costs as much as so many candidates.

        Raises HTTPException (429) where too many wait already. An empty queue takes work of any
        cost.
        """
        cost = REQUEST_COST + candidates
        overload = self.overload(cost)
        if overload:
            raise HTTPException(429, overload, RETRY)
        self.cost += cost
        self.waiting += 1
        try:
            yield
        finally:
            self.cost -= cost
            self.waiting -= 1

    def overload(self, cost: int = REQUEST_COST) -> str | None:
        """Why work is not taken on, if it is not: by default, any work."""
        if self.cost and self.cost + cost > self.limits.queued_candidates:
            return f"{self.cost:,} candidates wait already; ask again in a second"
        return None

    async def run(self, work: Callable[[], T], candidates: int) -> T:
        """The result of work that costs as much as so many candidates.

        Raises HTTPException: 429 where too many candidates wait already, 503 where its turn did not
        come in time.

        A thread of its own would share the interpreter with the event loop and slow both. Between
        two turns the loop runs more rounds the more requests wait: in a crowd many are heard and
        the limit is reached; while few wait, another worker that is free takes new ones.
        """
        seconds, clock = self.limits.deadline_seconds, asyncio.get_running_loop().time
        began = clock()
        with self.admitted(candidates):
            async with self._turn:
                if clock() - began > seconds:
                    sentence = f"the request waited {seconds:g} s for its turn; ask again later"
                    raise HTTPException(503, sentence, RETRY)
                for _ in range(1 + self.waiting):
                    await asyncio.sleep(0)
                return work()


class BodyBuffer:
    """Counts the bytes of bodies in memory, each from its first byte until it is answered."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self.bytes = limits, 0


class LimitedBody:
    """Receives the body of one request, within the limits on bytes and time.

    Raises HTTPException while a route reads it: 408 where it is late, 429 where the buffer is full.
    """

    def __init__(self, buffer: BodyBuffer, receive: Receive) -> None:
        self.buffer, self.receive = buffer, receive
        self.bytes, self.is_complete = 0, False
        self.due = asyncio.get_running_loop().time() + buffer.limits.receive_seconds

    async def __call__(self) -> Message:
        """The next part of the body; after the last one, whatever the server tells."""
        if self.is_complete:
            return await self.receive()
        try:
            async with asyncio.timeout_at(self.due):
                message = await self.receive()
        except TimeoutError:
            seconds = self.buffer.limits.receive_seconds
            sentence = f"the body of the request did not arrive within {seconds:g} s"
            raise HTTPException(408, sentence, {"connection": "close"}) from None
        self.is_complete = not message.get("more_body", False)
        self._hold(len(message.get("body", b"")))
        return message

    def _hold(self, count: int) -> None:
        if self.buffer.bytes + count > self.buffer.limits.buffered_bytes:
            sentence = f"bodies of {self.buffer.bytes:,} bytes are in memory; ask again in a second"
            raise HTTPException(429, sentence, RETRY)
        self.buffer.bytes += count
        self.bytes += count

    def release(self) -> None:
        """The body is not in memory any more."""
        self.buffer.bytes -= self.bytes
        self.bytes = 0


class Admission:
    """Middleware before the routes: refuses by headers alone, then limits how a body arrives."""

    def __init__(self, app: ASGIApp, buffer: BodyBuffer, queue: WorkQueue) -> None:
        self.app, self.buffer, self.queue = app, buffer, queue

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through to its route, or say why not."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = access_refusal(scope) or body_refusal(scope, self.queue)
        body = LimitedBody(self.buffer, receive)
        try:
            await (refusal or self.app)(scope, body, send)
        finally:
            body.release()


def body_refusal(scope: Scope, queue: WorkQueue) -> JSONResponse | None:
    """Why a body is not read, if it is not."""
    if scope["method"] != "POST":
        return None
    limits, overload = queue.limits, queue.overload()
    if overload:
        return error_response(429, overload, RETRY)
    length = Headers(scope=scope).get("content-length", "")
    if not length.isdigit():
        return error_response(411, "a request with a body says its length in content-length")
    if int(length) > limits.body_bytes:
        return error_response(
            413, f"a body of {int(length):,} bytes; at most {limits.body_bytes:,}"
        )
    return None


class Timing:
    """Middleware around all others: counts the seconds that each request took."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and observe route, status and seconds."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def observed(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self.app(scope, receive, observed)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            SECONDS.labels(route, status).observe(time.perf_counter() - began)
