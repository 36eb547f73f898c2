"""The service in a thread, and clients that connect by sockets."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

import pytest
import uvicorn
from starlette.types import ASGIApp

from ranking.feature_store.attributes import AttributeVersion
from ranking.serving.app import create_app
from ranking.serving.server import UVICORN_OPTIONS
from ranking.serving.settings import SETTINGS_VARIABLE, Settings
from ranking.serving.worker import Worker

ITEMS = ["ad-1", "ad-2", "ad-3"]
LONG_AGO = 1_600_000_000_000_000  # µs
JSON = {"content-type": "application/json"}


def advertised(item: str) -> AttributeVersion:
    """A version of an ad with its own advertiser; its bid is the last digit of its id."""
    attributes = {"kind": "ad", "goal": "traffic", "advertiser_id": f"of {item}"}
    return AttributeVersion(item, LONG_AGO, attributes, float(item[-1]), "traffic")


def rank_body(**changes: object) -> dict[str, Any]:
    """The body of a request to `/rank`."""
    return {"user": "u1", "surface": "feed", "candidates": ITEMS} | changes


def click_of(name: str) -> dict[str, str]:
    """The body of a click with the given id, by a separate user."""
    return {
        "event_id": name,
        "user": f"user-{name}",
        "item": "ad-1",
        "surface": "feed",
        "type": "ad_click",
    }


@dataclass(frozen=True)
class Client:
    """Sends requests to a port of this machine, each on its own connection."""

    port: int

    def request(
        self, method: str, path: str, body: object = None, **headers: str
    ) -> tuple[int, dict[str, Any]]:
        """The status and the JSON of the response to a request."""
        connection = HTTPConnection("localhost", self.port, timeout=30)
        content = json.dumps(body) if body is not None else None
        connection.request(method, path, content, JSON | headers)
        response = connection.getresponse()
        response_body = response.read()
        connection.close()
        return response.status, json.loads(response_body) if response_body else {}

    def connect(self, *sent: bytes) -> socket.socket:
        """Open a connection and send some bytes."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        for part in sent:
            connection.sendall(part)
        return connection


@dataclass(frozen=True)
class Service(Client):
    """The running service, with the worker and the server behind its port."""

    worker: Worker
    server: uvicorn.Server


def head(length: int, path: str = "/rank") -> bytes:
    """The headers of a request with a body of the given length."""
    return (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {length}\r\n\r\n"
    ).encode()


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def outcome(connection: socket.socket) -> tuple[int, float]:
    """The status of the response on a connection (0 without one), and the time of its closing."""
    received = b""
    with suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            received += part
    connection.close()
    return int(received[9:12]) if received else 0, time.perf_counter()


@contextmanager
def running(settings: Settings) -> Iterator[Service]:
    """Run the service in a thread of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SETTINGS_VARIABLE, settings.model_dump_json())
        app = create_app()
    with in_thread(app) as (port, server):
        yield Service(port, app.state.worker, server)


@contextmanager
def in_thread(app: ASGIApp) -> Iterator[tuple[int, uvicorn.Server]]:
    """Serve an application with the options of `gemline rank serve`; yields port and server."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", **UVICORN_OPTIONS))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1], server
    finally:
        server.should_exit = True
        thread.join()
