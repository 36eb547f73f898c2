"""The ranking service under load, and requests sampled from a lake's users and items.

The load is open-loop: requests arrive as a Poisson process, whether or not earlier ones were
answered. Each is sent on its own connection, so that any free worker can accept it.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import numpy as np

from benchmarks.harness import BenchmarkResult
from benchmarks.system.serving_args import ServingArgs
from etl.tables import arrow, label_schemas
from etl.tables.lake import Lake
from ranking.feature_store.request import RankRequest

CANDIDATES, REQUEST_BODIES, WORKERS, CLOSED_LOOP_CLIENTS, WARMUP_SECONDS = 100, 500, 2, 8, 8.0
Responses = list[tuple[int, float]]  # status, seconds


def sample_requests(
    lake: Lake, surface: str, day: date, candidates: int, count: int
) -> list[RankRequest]:
    """`count` requests at the end of a day, of random users for random ads of the lake.

    Users are drawn with replacement, ads only if there are fewer than candidates; the context is
    empty.
    """
    spec, rng = lake.spec, np.random.default_rng(0)
    impressions = arrow.snapshot(lake, label_schemas.impressions(spec)).read(["user_id", "item_id"])
    users = impressions["user_id"].unique().to_pylist()
    items = impressions["item_id"].unique().to_pylist()
    as_of = spec.day_end(day)
    repeats = len(items) < candidates
    return [
        RankRequest(
            user=str(rng.choice(users)),
            surface=surface,
            candidates=rng.choice(items, candidates, replace=repeats).tolist(),
            as_of=as_of,
        )
        for _ in range(count)
    ]


def measure_service_load(args: ServingArgs, result: BenchmarkResult) -> None:
    """Capacity in a closed loop, then open loops at 80 % and 300 % of it."""
    import uvloop

    requests = sample_requests(args.open_lake(), args.surface, args.day, CANDIDATES, REQUEST_BODIES)
    bodies = [{"user": r.user, "surface": r.surface, "candidates": r.candidates} for r in requests]
    with socket.create_server(("127.0.0.1", 0)) as free_socket:
        port = free_socket.getsockname()[1]
    command = [
        *(sys.executable, "-m", "gemline", "rank", "serve", "--spec", str(args.spec)),
        *("--lake", args.lake, "--workers", str(WORKERS), "--port", str(port)),
        *("--health-port", "0"),
        *("--start-time", f"{args.day}T23:59:59"),
    ]
    service = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            capacity, normal, overload = runner.run(run_loads(port, bodies, args.seconds))
    finally:
        stop(service)
    result.rows += [
        ("service, two workers", f"{capacity:.0f} requests/s", f"{CANDIDATES} candidates each", ""),
        ("at 80 % of capacity", summarize_responses(normal), "", "p99 <= 50 ms, no errors"),
        ("at 300 % of capacity", summarize_responses(overload), "", "stays up"),
    ]
    successful = [seconds for status, seconds in normal if status == 200]
    result.record("service_capacity", capacity, "")
    result.record("service_p99_ms", quantile_ms(successful, 0.99), "no request was successful")
    result.record("service_errors", len(normal) - len(successful), "")
    by_status = Counter(status for status, _ in overload)
    overload_errors = len(overload) - by_status[200] - by_status[429]
    result.record("service_overload_errors", overload_errors, "")


def stop(service: subprocess.Popen[bytes], seconds: float = 60) -> None:
    """Let a service end; kill it if it takes longer than some seconds."""
    service.send_signal(signal.SIGTERM)
    try:
        service.wait(seconds)
    except subprocess.TimeoutExpired:
        service.kill()
        service.wait()


def quantile_ms(seconds: Sequence[float], q: float) -> float:
    """A quantile in milliseconds; NaN without values."""
    return 1e3 * float(np.quantile(seconds, q)) if seconds else float("nan")


def summarize_responses(responses: Responses) -> str:
    """The number of responses by status, and latencies of the successful ones."""
    by_status = Counter(status for status, _ in responses)
    successful = [seconds for status, seconds in responses if status == 200]
    median, p99 = (quantile_ms(successful, q) for q in (0.5, 0.99))
    counts = ", ".join(f"{n:,} x {status}" for status, n in sorted(by_status.items()))
    return f"{counts}; median {median:.1f} ms, p99 {p99:.1f}"


async def run_loads(
    port: int, bodies: Sequence[dict[str, Any]], seconds: float
) -> tuple[float, Responses, Responses]:
    """The capacity in requests per second, then the responses at 80 % and at 300 % of it."""
    client = LoadClient(port, [encode_request("POST", "/rank", body) for body in bodies])
    await client.wait_until_ready()
    await client.closed_loop(WARMUP_SECONDS)
    capacity = await client.closed_loop(WARMUP_SECONDS)
    normal = await client.open_loop(0.8 * capacity, seconds)
    overload = await client.open_loop(3 * capacity, seconds / 4)
    await client.wait_until_ready()
    return capacity, normal, overload


def encode_request(method: str, route: str, body: object = None) -> bytes:
    """An HTTP/1.1 request as bytes."""
    content = json.dumps(body).encode() if body else b""
    head = (
        f"{method} {route} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + content


@dataclass(frozen=True)
class LoadClient:
    """Sends encoded requests, each on its own connection."""

    port: int
    requests: Sequence[bytes]

    async def wait_until_ready(self) -> None:
        """Wait until rankers are loaded. Raises TimeoutError after a minute."""
        async with asyncio.timeout(60):
            while (await self.send(encode_request("GET", "/ready")))[0] != 200:
                await asyncio.sleep(0.2)

    async def closed_loop(self, seconds: float) -> float:
        """Successful requests per second of clients that each wait for their response."""
        until, responses = time.perf_counter() + seconds, Counter[int]()

        async def sender(number: int) -> None:
            while time.perf_counter() < until:
                status, _ = await self.send_numbered(number + responses[200] * CLOSED_LOOP_CLIENTS)
                responses[status] += 1

        await asyncio.gather(*(sender(number) for number in range(CLOSED_LOOP_CLIENTS)))
        return responses[200] / seconds

    async def open_loop(self, rate: float, seconds: float) -> Responses:
        """Responses to requests that arrive as a Poisson process of `rate` per second."""
        rng = np.random.default_rng(0)
        tasks: list[asyncio.Task[tuple[int, float]]] = []
        due_time = start = time.perf_counter()
        while due_time < start + seconds:
            due_time += rng.exponential(1 / rate)
            await asyncio.sleep(max(0.0, due_time - time.perf_counter()))
            tasks.append(asyncio.create_task(self.send_numbered(len(tasks), due_time)))
        return list(await asyncio.gather(*tasks))

    async def send_numbered(self, number: int, due_time: float | None = None) -> tuple[int, float]:
        """Send one of the requests; returns as `send` does."""
        return await self.send(self.requests[number % len(self.requests)], due_time)

    async def send(self, request: bytes, due_time: float | None = None) -> tuple[int, float]:
        """Status of a request (0 without a response), and seconds since `due_time` (or now)."""
        start, response = due_time or time.perf_counter(), b""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(request)
            response = await reader.read(-1)
            writer.close()
        except OSError:
            pass
        status = int(response[9:12]) if response else 0
        return status, time.perf_counter() - start
