"""Admission control: bounds on bytes, time, connections and cost."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest
from fastapi import HTTPException
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ranking.serving.admission import WorkQueue
from ranking.serving.app import create_app
from ranking.serving.server import health_server, health_status
from ranking.serving.settings import SETTINGS_VARIABLE, ServiceLimits, Settings
from tests.conftest import ROOT
from tests.ranking.served import (
    Client,
    Service,
    free_port,
    head,
    in_thread,
    outcome,
    rank_body,
    running,
)

MEGABYTE = 1_000_000
LIMITS = ServiceLimits(
    max_body_bytes=MEGABYTE,
    max_buffered_bytes=4 * MEGABYTE,
    receive_timeout_seconds=1.0,
    max_connections=40,
)


def with_limits(settings: Settings, **changes: object) -> Settings:
    return settings.model_copy(update={"limits": LIMITS.model_copy(update=changes)})


@pytest.fixture
def service(settings: Settings) -> Iterator[Service]:
    with running(with_limits(settings)) as service:
        yield service


@pytest.fixture
def impatient_service(settings: Settings) -> Iterator[Service]:
    with running(with_limits(settings, receive_timeout_seconds=0.3)) as service:
        yield service


def test_slow_requests_are_buffered_up_to_the_bound_and_closed_in_time(
    settings: Settings,
) -> None:
    """Twenty clients send most of a megabyte each and then stop: 18 MB, of which 4 are buffered."""
    part, connections, buffered = b" " * (MEGABYTE - 100_000), [], []
    with running(with_limits(settings, receive_timeout_seconds=2)) as service:
        service.request("POST", "/rank", rank_body())
        tracemalloc.start()
        try:
            for _ in range(20):
                connections.append(service.connect(head(MEGABYTE), part))
                buffered.append(service.worker.body_buffer.total_bytes)
            started_at = time.perf_counter()
            status, _ = service.request("GET", "/health")
            statuses = Counter(outcome(connection)[0] for connection in connections)
            seconds, peak = time.perf_counter() - started_at, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert status == 200 and max(buffered) <= 4 * MEGABYTE and peak < 9 * MEGABYTE
        assert statuses.keys() == {408, 429}, statuses
        assert seconds < 2 + 1 + 2
        assert service.worker.body_buffer.total_bytes == 0
        assert service.request("POST", "/rank", rank_body())[0] == 200


@pytest.mark.parametrize(
    ("first", "drip", "status"),
    [
        (b"", b"", 408),
        (b"POST /rank HT", b"", 408),
        (b"POST /rank HTTP/1.1\r\nhost: localhost\r\n", b"x: y\r\n", 408),
        (head(MEGABYTE), b" ", 408),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nlong: " + b"x" * 70_000, b"", 431),
        (b"\r\n", b"\r\n", 408),
    ],
)
def test_a_client_that_sends_slowly_or_endlessly_is_answered_and_closed(
    impatient_service: Service, first: bytes, drip: bytes, status: int
) -> None:
    """The client either stops sending, or keeps sending a little."""
    started_at = time.perf_counter()
    connection = impatient_service.connect(first)
    closed = threading.Event()

    def send() -> None:
        while drip and not closed.wait(0.1):
            try:
                connection.sendall(drip)
            except OSError:
                return

    sender = threading.Thread(target=send)
    sender.start()
    received_status, closed_at = outcome(connection)
    closed.set()
    sender.join()
    assert received_status == status and closed_at - started_at < 0.3 + 1 + 2


def test_a_refused_body_is_not_read_endlessly(impatient_service: Service) -> None:
    """The response is immediate; further data is dropped until the connection closes."""
    started_at = time.perf_counter()
    connection = impatient_service.connect(head(100 * MEGABYTE))
    assert b" 413 " in connection.recv(100)
    with pytest.raises(ConnectionError):
        send_until(connection, started_at + 10)
    assert time.perf_counter() - started_at < 0.3 + 1 + 2
    connection.close()


def send_until(connection: socket.socket, deadline: float) -> None:
    while time.perf_counter() < deadline:
        connection.sendall(b" ")
        time.sleep(0.05)


def test_a_client_that_does_not_read_its_response_is_closed() -> None:
    """Before the keep-alive timeout (5 s), which would wait for unsent data."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[dict[str, ServiceLimits]]:
        yield {"limits": LIMITS}

    async def respond(_: Request) -> Response:
        return Response(b" " * 40 * MEGABYTE)

    app = Starlette(routes=[Route("/", respond)], lifespan=lifespan)
    with in_thread(app) as (port, server), socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port))
        connection.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        connections = server.server_state.connections
        wait_for(lambda: any(c.transport.get_write_buffer_size() for c in connections))
        started_at = time.perf_counter()
        wait_for(lambda: not connections)
        assert time.perf_counter() - started_at < 1 + 2


def test_more_connections_than_the_limit_are_refused(settings: Settings) -> None:
    with running(with_limits(settings, max_connections=5, receive_timeout_seconds=3)) as service:
        allowed = [service.connect() for _ in range(5)]
        for connection in allowed:  # each is accepted before the next
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        refused = [service.connect() for _ in range(3)]
        assert {outcome(connection)[0] for connection in refused} == {503}
        allowed.pop().close()
        deadline = time.perf_counter() + 5
        while service.request("GET", "/health")[0] != 200:
            assert time.perf_counter() < deadline
        for connection in allowed:
            connection.close()


def statuses_of_concurrent_requests(settings: Settings, sizes: list[int]) -> list[int]:
    """Statuses of requests with the given numbers of candidates, sent while another is ranked."""
    ads = [f"ad-{number}" for number in range(max(sizes))]

    async def send() -> list[int]:
        app = create_app()
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
        queue = app.state.worker.work_queue
        async with client:
            await queue._lock.acquire()
            posts = [
                asyncio.create_task(client.post("/rank", json=rank_body(candidates=ads[:size])))
                for size in sizes
            ]
            while sum(post.done() for post in posts) + queue.queue_length < len(sizes):
                await asyncio.sleep(0.01)
            queue._lock.release()
            responses = await asyncio.gather(*posts)
        app.state.worker.close()
        return [response.status_code for response in responses]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SETTINGS_VARIABLE, settings.model_dump_json())
        return asyncio.run(send())


def test_the_queue_is_bounded_by_candidates_not_by_requests(settings: Settings) -> None:
    """Many small requests are queued where two large ones are not; an empty queue admits any."""
    full = with_limits(settings, max_queued_candidates=1000)
    assert statuses_of_concurrent_requests(full, [1] * 9) == [200] * 9
    assert statuses_of_concurrent_requests(full, [1] * 10) == [200] * 9 + [429]
    assert statuses_of_concurrent_requests(full, [400, 400, 300]) == [200, 200, 429]
    assert statuses_of_concurrent_requests(full, [5000, 1]) == [200, 429]
    assert statuses_of_concurrent_requests(full, [700, 200, 1]) == [200, 429, 200]


def test_with_a_full_queue_no_body_is_read(service: Service) -> None:
    service.worker.work_queue.queued_cost += LIMITS.max_queued_candidates
    connection = service.connect(head(1000))
    assert b" 429 " in connection.recv(1000)
    connection.close()
    assert service.request("GET", "/ready")[0] == 200
    service.worker.work_queue.queued_cost -= LIMITS.max_queued_candidates
    assert service.request("POST", "/rank", rank_body())[0] == 200


def test_work_that_waits_too_long_is_refused_and_the_next_runs() -> None:
    async def run_all() -> list[object]:
        queue = WorkQueue(ServiceLimits(queue_timeout_seconds=0.2))

        def slow() -> str:
            time.sleep(0.4)
            return "slow"

        def quick() -> str:
            return "quick"

        runs = [queue.run(work, 1) for work in (slow, quick, quick, quick)]
        results = await asyncio.gather(*runs, return_exceptions=True)
        assert queue.queued_cost == queue.queue_length == 0
        return [*results, await queue.run(quick, 1)]

    first, *late, last = asyncio.run(run_all())
    assert first == "slow" and last == "quick"
    for error in late:
        assert isinstance(error, HTTPException) and error.status_code == 503
        assert "waited 0.2 s" in error.detail


def test_health_is_answered_while_the_worker_is_busy(settings: Settings, tmp_path: Path) -> None:
    """The event loop is blocked for two seconds, as by a long ranking."""
    reporting = settings.model_copy(update={"status_folder": tmp_path})
    is_free = threading.Event()

    def busy() -> None:
        deadline = time.perf_counter() + 2
        while time.perf_counter() < deadline:
            pass
        is_free.set()

    with running(reporting) as service, health_server("127.0.0.1", 0, tmp_path, 1) as port:
        health = Client(port)
        while health.request("GET", "/health")[0] != 200:
            time.sleep(0.05)
        service.server.servers[0].get_loop().call_soon_threadsafe(busy)
        time.sleep(0.1)
        status, body = health.request("GET", "/health")
        assert status == 200 and not is_free.is_set()
        assert body["status"] == "ok" and body["workers"][0]["ranker_versions"]["feed"]
        assert service.request("GET", "/health")[0] == 200 and is_free.is_set()
    assert health_status(tmp_path, 1) == {"status": "down", "workers": []}


def test_a_worker_reports_again_after_its_status_could_not_be_written(
    settings: Settings, tmp_path: Path
) -> None:
    folder = tmp_path / "status"
    with running(settings.model_copy(update={"status_folder": folder})):
        time.sleep(0.2)  # the folder is missing at the first attempts
        folder.mkdir()
        wait_for(lambda: health_status(folder, 1)["status"] == "ok")


def test_health_reports_unresponsive_workers_and_ignores_dead_ones(
    service: Service, tmp_path: Path
) -> None:
    status = service.worker.status
    with_error = status.model_copy(update={"ranker_errors": {"reels": "damaged"}})
    alive, dead = tmp_path / f"worker-{os.getpid()}.json", tmp_path / "worker-99999999.json"
    dead.write_text(status.model_dump_json())
    assert health_status(tmp_path, 1)["status"] == "down"
    alive.write_text(status.model_dump_json())
    health = health_status(tmp_path, 1)
    assert health["status"] == "ok" and len(health["workers"]) == 1
    assert health_status(tmp_path, 2)["status"] == "degraded", "one of two workers is missing"
    alive.write_text(with_error.model_dump_json())
    assert health_status(tmp_path, 1)["status"] == "degraded"
    os.utime(alive, (time.time() - 20,) * 2)
    health = health_status(tmp_path, 1)
    assert health["status"] == "down" and health["workers"][0]["is_unresponsive"]


@pytest.mark.proof
def test_fifty_slow_requests_of_4_mib_to_a_real_service(settings: Settings) -> None:
    """It buffers up to its bound, closes all in time, and answers others meanwhile."""
    port, health_port = free_port(), free_port()
    service = subprocess.Popen(
        [*(sys.executable, "-m", "gemline", "rank", "serve", "--spec", str(settings.spec)),
         *("--lake", settings.lake, "--port", str(port), "--health-port", str(health_port)),
         *("--limits.receive-timeout-seconds", "5")],
        cwd=ROOT,
    )  # fmt: skip
    rank_client, health_client = Client(port), Client(health_port)
    try:
        wait_for(lambda: health_client.request("GET", "/health")[0] == 200)
        rank_client.request("POST", "/rank", rank_body())
        bytes_before, started_at = resident_bytes(service.pid), time.perf_counter()
        slow = [rank_client.connect(head(4 << 20), b" " * (3 << 20)) for _ in range(50)]
        peak = 0
        while time.perf_counter() - started_at < 4:
            peak = max(peak, resident_bytes(service.pid))
            sent_at = time.perf_counter()
            assert health_client.request("GET", "/health")[0] == 200
            assert time.perf_counter() - sent_at < 1
            assert rank_client.request("GET", "/ready")[0] == 200
        outcomes = [outcome(connection) for connection in slow]
        assert {status for status, _ in outcomes} == {408, 429}
        assert max(closed_at for _, closed_at in outcomes) - started_at < 5 + 1 + 3
        assert peak - bytes_before < (32 << 20) + 50 * 300_000 + (16 << 20)
        assert rank_client.request("POST", "/rank", rank_body())[0] == 200
    finally:
        service.terminate()
        assert service.wait(60) == 0


def resident_bytes(pid: int) -> int:
    """The memory of a process that is not backed by files."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds; it does not while a service refuses connections."""
    deadline = time.perf_counter() + 60
    while time.perf_counter() < deadline:
        with suppress(OSError):
            if condition():
                return
        time.sleep(0.01)
    raise TimeoutError
