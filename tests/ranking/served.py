"""A lake that can be served, the service in a thread, and clients that speak to it by sockets."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

import pytest
import uvicorn

from ranking.online.attributes import Version
from ranking.serve.app import create
from ranking.serve.run import OPTIONS
from ranking.serve.settings import NAME, Settings
from ranking.serve.worker import Worker

ITEMS = ["ad-1", "ad-2", "ad-3"]
LONG_AGO = 1_600_000_000_000_000  # µs
JSON = {"content-type": "application/json"}


def advertised(item: str) -> Version:
    """An ad of an advertiser of its own, whose bid is the last digit of its name."""
    values = {"kind": "ad", "goal": "traffic", "advertiser_id": f"of {item}"}
    return Version(item, LONG_AGO, values, float(item[-1]), "traffic")


def asking(**changes: object) -> dict:
    return {"user": "u1", "surface": "feed", "candidates": ITEMS} | changes


@dataclass(frozen=True)
class Service:
    """The service as its worker and its server; its port may be that of another server."""

    port: int
    worker: Worker
    server: uvicorn.Server

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, dict]:
        """Status and JSON of the answer to a request on a connection of its own."""
        connection = HTTPConnection("localhost", self.port, timeout=30)
        content = json.dumps(body) if body is not None else None
        connection.request(method, path, content, JSON | headers)
        answer = connection.getresponse()
        found = answer.read()
        connection.close()
        return answer.status, json.loads(found) if found else {}

    def connect(self, *sent: bytes) -> socket.socket:
        """A connection on which something was sent."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        for part in sent:
            connection.sendall(part)
        return connection


def head(length: int, path: str = "/rank") -> bytes:
    """The headers of a request with a body of so many bytes."""
    return (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {length}\r\n\r\n"
    ).encode()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def outcome(connection: socket.socket) -> tuple[int, float]:
    """The status that a connection is answered with before it is closed, and when it is closed."""
    found = b""
    try:
        while part := connection.recv(1 << 16):
            found += part
    except ConnectionError:
        pass
    connection.close()
    return int(found[9:12]) if found else 0, time.perf_counter()


@contextmanager
def running(settings: Settings) -> Iterator[Service]:
    """The service in a thread of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(NAME, settings.model_dump_json())
        app = create()
    with in_thread(app) as (port, server):
        yield Service(port, app.state.worker, server)


@contextmanager
def in_thread(app: Any) -> Iterator[tuple[int, uvicorn.Server]]:
    """The port of an application that is served by the options of `gemline rank serve`."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", **OPTIONS))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until = time.monotonic() + 30
    while not server.started and time.monotonic() < until:
        time.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1], server
    finally:
        server.should_exit = True
        thread.join()
