"""Admission control of a worker: bounds on the size, time and cost of requests."""

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

from ranking.serving.auth import access_error
from ranking.serving.errors import RETRY_AFTER, error_response
from ranking.serving.settings import ServiceLimits

T = TypeVar("T")
FIXED_REQUEST_COST = 100  # the cost of a request without candidates, in candidates
REQUEST_SECONDS = Histogram(
    "gemline_request_duration_seconds",
    "Time from the arrival of a request to its response",
    ("route", "status"),
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2),
)


class WorkQueue:
    """Runs work one piece after the other, and refuses work beyond the limits."""

    def __init__(self, limits: ServiceLimits) -> None:
        self.limits = limits
        self.queued_cost = self.queue_length = 0
        self._lock = asyncio.Lock()

    @contextmanager
    def admit(self, cost: int) -> Iterator[None]:
        """Count work as queued until the block ends; an empty queue admits work of any cost.

        Args:
            cost: Its candidates, events or versions; FIXED_REQUEST_COST is added.

        Raises:
            HTTPException: The queue is full (429).
        """
        cost += FIXED_REQUEST_COST
        overload = self.overload_message(cost)
        if overload:
            raise HTTPException(429, overload, RETRY_AFTER)
        self.queued_cost += cost
        self.queue_length += 1
        try:
            yield
        finally:
            self.queued_cost -= cost
            self.queue_length -= 1

    def overload_message(self, cost: int = FIXED_REQUEST_COST) -> str | None:
        """The reason for refusing work of some cost, by default the least; None if admitted."""
        if self.queued_cost and self.queued_cost + cost > self.limits.max_queued_candidates:
            return f"the queue is full ({self.queued_cost:,} candidates); retry in a second"
        return None

    async def run(self, work: Callable[[], T], cost: int) -> T:
        """Run work of some cost (see `admit`) on the event loop, and return its result.

        The work is not moved to a thread, which would share the interpreter with the event loop and
        slow both down. Instead, the event loop runs between two pieces of work, for more rounds the
        longer the queue is: under overload, requests are read and refused early; with a short
        queue, new connections are left to workers that are idle.

        Raises:
            HTTPException: The queue is full (429), or the work waited too long (503).
        """
        timeout, clock = self.limits.queue_timeout_seconds, asyncio.get_running_loop().time
        queued_at = clock()
        with self.admit(cost):
            async with self._lock:
                if clock() - queued_at > timeout:
                    message = f"the request waited {timeout:g} s in the queue; retry later"
                    raise HTTPException(503, message, RETRY_AFTER)
                for _ in range(1 + self.queue_length):
                    await asyncio.sleep(0)
                return work()


class BodyBuffer:
    """Counts the bytes of the request bodies in memory, until their responses are sent."""

    def __init__(self, limits: ServiceLimits) -> None:
        self.limits, self.total_bytes = limits, 0


class LimitedBody:
    """The ASGI receive channel of one request, with limits on the size and time of its body.

    Receiving raises HTTPException if the body is late (408) or the buffer is full (429).
    """

    def __init__(self, buffer: BodyBuffer, receive: Receive) -> None:
        self.buffer, self.receive = buffer, receive
        self.received_bytes, self.is_complete = 0, False
        self.deadline = asyncio.get_running_loop().time() + buffer.limits.receive_timeout_seconds

    async def __call__(self) -> Message:
        """Receive the next part of the body; after the last one, messages of the server."""
        if self.is_complete:
            return await self.receive()
        try:
            async with asyncio.timeout_at(self.deadline):
                message = await self.receive()
        except TimeoutError:
            timeout = self.buffer.limits.receive_timeout_seconds
            text = f"the body of the request did not arrive within {timeout:g} s"
            raise HTTPException(408, text, {"connection": "close"}) from None
        self.is_complete = not message.get("more_body", False)
        self._reserve(len(message.get("body", b"")))
        return message

    def _reserve(self, num_bytes: int) -> None:
        if self.buffer.total_bytes + num_bytes > self.buffer.limits.max_buffered_bytes:
            text = f"request bodies take {self.buffer.total_bytes:,} bytes; retry in a second"
            raise HTTPException(429, text, RETRY_AFTER)
        self.buffer.total_bytes += num_bytes
        self.received_bytes += num_bytes

    def release(self) -> None:
        """Free the bytes of the body, once it is answered."""
        self.buffer.total_bytes -= self.received_bytes
        self.received_bytes = 0


class AdmissionMiddleware:
    """ASGI middleware that refuses requests by their headers, and limits how bodies arrive."""

    def __init__(self, app: ASGIApp, buffer: BodyBuffer, queue: WorkQueue) -> None:
        self.app, self.buffer, self.queue = app, buffer, queue

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the application, or answer with an error."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = access_error(scope) or body_error(scope, self.queue)
        body = LimitedBody(self.buffer, receive)
        try:
            await (refusal or self.app)(scope, body, send)
        finally:
            body.release()


def body_error(scope: Scope, queue: WorkQueue) -> JSONResponse | None:
    """The response to a request whose body is not read; None if it is."""
    if scope["method"] != "POST":
        return None
    limits, overload = queue.limits, queue.overload_message()
    if overload:
        return error_response(429, overload, RETRY_AFTER)
    length = Headers(scope=scope).get("content-length", "")
    if not length.isdigit():
        return error_response(411, "a request with a body needs a content-length header")
    if int(length) > limits.max_body_bytes:
        return error_response(
            413, f"a body of {int(length):,} bytes; at most {limits.max_body_bytes:,}"
        )
    return None


class RequestTimingMiddleware:
    """Outermost ASGI middleware: observes the duration of requests by route and status."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and observe how long it took."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started_at, status = time.perf_counter(), 500

        async def send_observed(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self.app(scope, receive, send_observed)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            REQUEST_SECONDS.labels(route, status).observe(time.perf_counter() - started_at)
