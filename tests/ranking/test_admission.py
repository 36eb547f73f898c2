"""What the service takes on: bounds on bytes, time, connections and cost."""

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
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import uvicorn
from fastapi import HTTPException
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ranking.serve.admission import WorkQueue
from ranking.serve.app import create
from ranking.serve.health import health, health_server
from ranking.serve.settings import NAME, Limits, Settings
from tests.conftest import ROOT
from tests.ranking.served import Service, asking, free_port, head, in_thread, outcome, running

MEGABYTE = 1_000_000
LIMITS = Limits(
    body_bytes=MEGABYTE, buffered_bytes=4 * MEGABYTE, receive_seconds=1.0, connections=40
)


def limited(settings: Settings, **changes: object) -> Settings:
    return settings.model_copy(update={"limits": LIMITS.model_copy(update=changes)})


@pytest.fixture
def service(settings: Settings) -> Iterator[Service]:
    with running(limited(settings)) as found:
        yield found


@pytest.fixture
def hasty(settings: Settings) -> Iterator[Service]:
    with running(limited(settings, receive_seconds=0.3)) as found:
        yield found


def test_slow_requests_hold_no_more_than_the_bound_and_are_closed_in_time(
    settings: Settings,
) -> None:
    """Twenty clients send most of a megabyte each and then nothing: 18 MB, of which 4 may stay."""
    part, slow, held = b" " * (MEGABYTE - 100_000), [], []
    with running(limited(settings, receive_seconds=2)) as service:
        service.ask("POST", "/rank", asking())
        tracemalloc.start()
        try:
            for _ in range(20):
                slow.append(service.connect(head(MEGABYTE), part))
                held.append(service.worker.buffer.bytes)
            began = time.perf_counter()
            status, _ = service.ask("GET", "/health")
            statuses = Counter(outcome(one)[0] for one in slow)
            seconds, peak = time.perf_counter() - began, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert status == 200 and max(held) <= 4 * MEGABYTE and peak < 9 * MEGABYTE
        assert statuses.keys() == {408, 429}, statuses
        assert seconds < 2 + 1 + 2
        assert service.worker.buffer.bytes == 0
        assert service.ask("POST", "/rank", asking())[0] == 200


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
def test_who_sends_slowly_or_without_end_is_answered_and_closed(
    hasty: Service, first: bytes, drip: bytes, status: int
) -> None:
    """Whether nothing more comes, or a little all the time."""
    began = time.perf_counter()
    connection = hasty.connect(first)
    closed = threading.Event()

    def send() -> None:
        while drip and not closed.wait(0.1):
            try:
                connection.sendall(drip)
            except OSError:
                return

    sender = threading.Thread(target=send)
    sender.start()
    found, end = outcome(connection)
    closed.set()
    sender.join()
    assert found == status and end - began < 0.3 + 1 + 2


def test_a_refused_body_is_not_read_without_end(hasty: Service) -> None:
    """It has its answer at once; what it sends on is thrown away for a while, then it is closed."""
    began = time.perf_counter()
    connection = hasty.connect(head(100 * MEGABYTE))
    assert b" 413 " in connection.recv(100)
    with pytest.raises(OSError):
        while time.perf_counter() - began < 10:
            connection.sendall(b" ")
            time.sleep(0.05)
    assert time.perf_counter() - began < 0.3 + 1 + 2
    connection.close()


def test_who_does_not_read_its_answer_is_closed() -> None:
    """Before the end of keep-alive (5 s), which would wait for what is not sent yet."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[dict]:
        yield {"limits": LIMITS}

    async def answer(_: Request) -> Response:
        return Response(b" " * 40 * MEGABYTE)

    app = Starlette(routes=[Route("/", answer)], lifespan=lifespan)
    with in_thread(app) as (port, server), socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port))
        connection.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        connections = server.server_state.connections
        wait_for(lambda: any(one.transport.get_write_buffer_size() for one in connections))
        began = time.perf_counter()
        wait_for(lambda: not connections)
        assert time.perf_counter() - began < 1 + 2


def test_more_connections_than_the_limit_are_refused(settings: Settings) -> None:
    with running(limited(settings, connections=5, receive_seconds=3)) as service:
        first = [service.connect() for _ in range(5)]
        for one in first:  # each is accepted before the next
            one.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert one.recv(100).startswith(b"HTTP/1.1 200")
        beyond = [service.connect() for _ in range(3)]
        assert {outcome(one)[0] for one in beyond} == {503}
        first.pop().close()
        until = time.perf_counter() + 5
        while service.ask("GET", "/health")[0] != 200:
            assert time.perf_counter() < until
        for one in first:
            one.close()


def asked_at_once(settings: Settings, sizes: list[int]) -> list[int]:
    """Statuses of requests of so many candidates each, that come while another one is worked on."""

    async def ask() -> list[int]:
        app = create()
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
        work = app.state.worker.queue
        async with client:
            await work._turn.acquire()
            asking_now = [
                asyncio.create_task(client.post("/rank", json=asking(candidates=["ad-1"] * size)))
                for size in sizes
            ]
            while sum(one.done() for one in asking_now) + work.waiting < len(sizes):
                await asyncio.sleep(0.01)
            work._turn.release()
            answers = await asyncio.gather(*asking_now)
        app.state.worker.close()
        return [answer.status_code for answer in answers]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(NAME, settings.model_dump_json())
        return asyncio.run(ask())


def test_what_waits_is_bounded_by_candidates_not_by_requests(settings: Settings) -> None:
    """Many small requests wait where two large ones may not; a free queue takes any size."""
    full = limited(settings, queued_candidates=1000)
    assert asked_at_once(full, [1] * 9) == [200] * 9
    assert asked_at_once(full, [1] * 10) == [200] * 9 + [429]
    assert asked_at_once(full, [400, 400, 300]) == [200, 200, 429]
    assert asked_at_once(full, [5000, 1]) == [200, 429]
    assert asked_at_once(full, [700, 200, 1]) == [200, 429, 200]


def test_where_nothing_more_can_wait_no_body_is_read(service: Service) -> None:
    service.worker.queue.cost += LIMITS.queued_candidates
    connection = service.connect(head(1000))
    assert b" 429 " in connection.recv(1000)
    connection.close()
    assert service.ask("GET", "/ready")[0] == 200
    service.worker.queue.cost -= LIMITS.queued_candidates
    assert service.ask("POST", "/rank", asking())[0] == 200


def test_work_that_waits_too_long_is_given_up_and_the_next_goes_on() -> None:
    async def ask() -> list[object]:
        queue = WorkQueue(Limits(deadline_seconds=0.2))
        slow, late = lambda: time.sleep(0.4), lambda: "answered"
        at_once = [queue.run(work, 1) for work in (slow, late, late, late)]
        found = await asyncio.gather(*at_once, return_exceptions=True)
        assert queue.cost == queue.waiting == 0
        return [*found, await queue.run(late, 1)]

    done, *late, after = asyncio.run(ask())
    assert done is None and after == "answered"
    for error in late:
        assert isinstance(error, HTTPException) and error.status_code == 503
        assert "waited 0.2 s" in error.detail


def test_health_is_answered_while_the_worker_is_busy(settings: Settings, tmp_path: Path) -> None:
    """A loop that holds the interpreter for two seconds, as a long ranking does in part."""
    reporting = settings.model_copy(update={"status_folder": tmp_path})
    is_free = threading.Event()

    def busy() -> None:
        until = time.perf_counter() + 2
        while time.perf_counter() < until:
            pass
        is_free.set()

    with running(reporting) as service, health_server("127.0.0.1", 0, tmp_path) as port:
        own = replace(service, port=port)
        while own.ask("GET", "/health")[0] != 200:
            time.sleep(0.05)
        service.server.servers[0].get_loop().call_soon_threadsafe(busy)
        time.sleep(0.1)
        status, found = own.ask("GET", "/health")
        assert status == 200 and not is_free.is_set()
        assert found["status"] == "ok" and found["workers"][0]["rankers"]["feed"]
        assert service.ask("GET", "/health")[0] == 200 and is_free.is_set()
    assert health(tmp_path) == {"status": "down", "workers": []}


def test_health_names_workers_that_are_stuck_and_leaves_out_dead_ones(
    service: Service, tmp_path: Path
) -> None:
    state = service.worker.state
    wrong = state.model_copy(update={"ranker_faults": {"reels": "damaged"}})
    own, dead = tmp_path / f"worker-{os.getpid()}.json", tmp_path / "worker-99999999.json"
    dead.write_text(state.model_dump_json())
    assert health(tmp_path)["status"] == "down"
    own.write_text(state.model_dump_json())
    assert health(tmp_path)["status"] == "ok" and len(health(tmp_path)["workers"]) == 1
    own.write_text(wrong.model_dump_json())
    assert health(tmp_path)["status"] == "degraded"
    os.utime(own, (time.time() - 20,) * 2)
    found = health(tmp_path)
    assert found["status"] == "down" and found["workers"][0]["is_stuck"]


@pytest.mark.proof
def test_fifty_slow_requests_of_4_mib_to_a_real_service(settings: Settings) -> None:
    """It holds no more than its bound, closes all in time, and answers others meanwhile."""
    port, health_port = free_port(), free_port()
    service = subprocess.Popen(
        [*(sys.executable, "-m", "gemline", "rank", "serve", "--spec", str(settings.spec)),
         *("--lake", settings.lake, "--port", str(port), "--health-port", str(health_port)),
         *("--limits.receive-seconds", "5")],
        cwd=ROOT,
    )  # fmt: skip
    nobody = uvicorn.Server(uvicorn.Config("nobody"))
    own, its_health = (Service(n, None, nobody) for n in (port, health_port))
    try:
        wait_for(lambda: its_health.ask("GET", "/health")[0] == 200)
        own.ask("POST", "/rank", asking())
        before, began = resident_bytes(service.pid), time.perf_counter()
        slow = [own.connect(head(4 << 20), b" " * (3 << 20)) for _ in range(50)]
        peak = 0
        while time.perf_counter() - began < 4:
            peak = max(peak, resident_bytes(service.pid))
            asked = time.perf_counter()
            assert its_health.ask("GET", "/health")[0] == 200 and time.perf_counter() - asked < 1
            assert own.ask("GET", "/ready")[0] == 200
        ends = [outcome(one) for one in slow]
        assert {status for status, _ in ends} == {408, 429}
        assert max(end for _, end in ends) - began < 5 + 1 + 3
        assert peak - before < (32 << 20) + 50 * 300_000 + (16 << 20)
        assert own.ask("POST", "/rank", asking())[0] == 200
    finally:
        service.terminate()
        assert service.wait(60) == 0


def resident_bytes(pid: int) -> int:
    """Memory of a process that is not in files."""
    (line,) = (
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("RssAnon")
    )  # fmt: skip
    return int(line.split()[1]) << 10


def wait_for(is_so: Callable[[], bool]) -> None:
    """Returns when something is so; a service that does not answer yet counts as not."""
    until = time.perf_counter() + 60
    while time.perf_counter() < until:
        with suppress(OSError):
            if is_so():
                return
        time.sleep(0.01)
    raise TimeoutError
