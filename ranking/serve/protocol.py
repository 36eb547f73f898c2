"""uvicorn's HTTP protocol, with limits on connections, on headers and on the time of a request.

uvicorn itself bounds neither the size nor the time of headers, waits for a body without end, and
keeps a response for a client that does not read it.
"""

import asyncio
import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from ranking.serve.settings import Limits

MAX_HEADER_BYTES = 64 << 10
LINGER_SECONDS = 1.0  # for a client to read why it was refused


class LimitedProtocol(HttpToolsProtocol):
    """One connection of a server whose lifespan state holds its `limits`.

    A single timer runs: until the headers are complete, until the body is, until the response is
    sent. `header_bytes` counts what came of a request whose headers are not complete yet.
    """

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config, server_state, app_state, _loop)
        self.limits: Limits = app_state["limits"]
        self.timer: asyncio.TimerHandle | None = None
        self.header_bytes: int | None = 0
        self.is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse the connection where there are too many, else wait for its first headers."""
        super().connection_made(transport)
        if len(self.connections) > 2 * self.limits.connections:  # more than can be told so
            transport.abort()
        elif len(self.connections) > self.limits.connections:
            self._refuse(503, "too many connections are open; ask again in a second")
        else:
            self._start_timer(self.limits.receive_seconds, self._on_late_headers)

    def data_received(self, data: bytes) -> None:
        """Parse what came, unless the headers of a request are too large."""
        if self.is_refused:
            return
        if self.header_bytes is not None:
            self.header_bytes += len(data)
            if self.timer is None:
                self._start_timer(self.limits.receive_seconds, self._on_late_headers)
        super().data_received(data)
        if self.header_bytes is not None and self.header_bytes > MAX_HEADER_BYTES:
            self._refuse(431, f"headers are at most {MAX_HEADER_BYTES:,} bytes")

    def on_headers_complete(self) -> None:
        """Start the request, and wait for its body."""
        self.header_bytes = None
        self._start_timer(self.limits.receive_seconds + LINGER_SECONDS, self._on_late_body)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body is complete: nothing more is expected of the client."""
        self.header_bytes = 0
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Forget what came of a body that was not read, and wait until the response is sent."""
        super().on_response_complete()
        if self.cycle.response_complete:
            self.cycle.body = bytearray()
        if self.timer is None and self.transport.get_write_buffer_size():
            self._start_timer(self.limits.receive_seconds, self._on_late_reader)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer of a connection that is gone."""
        self._stop_timer()
        super().connection_lost(exc)

    def _on_late_headers(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            seconds = self.limits.receive_seconds
            self._refuse(408, f"the headers of the request did not arrive within {seconds:g} s")
        else:  # an earlier request of this connection is not answered yet
            self._start_timer(self.limits.receive_seconds, self._on_late_headers)

    def _on_late_body(self) -> None:
        self.transport.abort()

    def _on_late_reader(self) -> None:
        self.timer = None
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        elif self.header_bytes:
            self._start_timer(self.limits.receive_seconds, self._on_late_headers)

    def _refuse(self, status: int, sentence: str) -> None:
        """Answer with an error and read no further; the client gets a moment to read it."""
        self.is_refused = True
        body = json.dumps({"error": sentence}).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.write_eof()
        self._start_timer(LINGER_SECONDS, self.transport.abort)

    def _start_timer(self, seconds: float, callback: Callable[[], object]) -> None:
        self._stop_timer()
        self.timer = self.loop.call_later(seconds, callback)

    def _stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
