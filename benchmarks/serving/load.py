"""The service under open-loop Poisson load: requests come when they come, answered or not.

Each comes on a connection of its own, so that whichever worker is free takes it.
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
from typing import Any

import numpy as np

from benchmarks.result import Result
from benchmarks.serving.workload import ServingArgs, askers

CANDIDATES, BODIES, WORKERS, AT_ONCE, WARM_SECONDS = 100, 500, 2, 8, 8.0
Answers = list[tuple[int, float]]  # status, seconds


def measure(args: ServingArgs, result: Result) -> None:
    """Capacity with some clients that wait, then 80 % and 300 % of it that do not wait."""
    import uvloop

    asked = askers(args.open_lake(), args.surface, args.day, CANDIDATES, BODIES)
    bodies = [{"user": a.user, "surface": a.surface, "candidates": a.candidates} for a in asked]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "gemline", "rank", "serve", "--spec", str(args.spec)),
        *("--lake", args.lake, "--workers", str(WORKERS), "--port", str(port)),
        *("--health-port", "0"),
        *("--clock", f"{args.day}T23:59:59"),
    ]
    service = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            found = runner.run(loads(port, bodies, args.seconds))
    finally:
        service.send_signal(signal.SIGTERM)
        service.wait(60)
    capacity, usual, much = found
    told = tell(usual), tell(much)
    result.rows += [
        ("service, two workers", f"{capacity:.0f} requests/s", f"{CANDIDATES} candidates each", ""),
        ("at 80 % of that", told[0], "", "p99 <= 50 ms, no errors"),
        ("at 300 %", told[1], "", "stays up"),
    ]
    good = [seconds for status, seconds in usual if status == 200]
    result.take("service_capacity", capacity, "")
    result.take("service_p99_ms", 1e3 * float(np.quantile(good, 0.99)), "")
    result.take("service_errors", len(usual) - len(good), "")
    other = Counter(status for status, _ in much)
    result.take("service_overload_errors", len(much) - other[200] - other[429], "")


def tell(answers: Answers) -> str:
    """How many of each status, and how long the good ones took."""
    by_status = Counter(status for status, _ in answers)
    good = 1e3 * np.quantile([s for status, s in answers if status == 200], (0.5, 0.99))
    counts = ", ".join(f"{n:,} x {status}" for status, n in sorted(by_status.items()))
    return f"{counts}; median {good[0]:.1f} ms, p99 {good[1]:.1f}"


async def loads(
    port: int, bodies: Sequence[dict[str, Any]], seconds: float
) -> tuple[float, Answers, Answers]:
    """Requests a second at most, then what became of those of two loads."""
    client = Client(port, [encoded("POST", "/rank", body) for body in bodies])
    await client.ready()
    await client.closed(WARM_SECONDS)
    capacity = await client.closed(WARM_SECONDS)
    usual = await client.poisson(0.8 * capacity, seconds)
    much = await client.poisson(3 * capacity, seconds / 4)
    await client.ready()
    return capacity, usual, much


def encoded(method: str, route: str, body: object = None) -> bytes:
    """A request as it is sent."""
    content = json.dumps(body).encode() if body else b""
    head = (
        f"{method} {route} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + content


@dataclass(frozen=True)
class Client:
    """Sends requests that were encoded before, each on a connection of its own."""

    port: int
    requests: Sequence[bytes]

    async def ready(self) -> None:
        """Wait until there are rankers. Raises TimeoutError after a minute."""
        async with asyncio.timeout(60):
            while (await self.send(encoded("GET", "/ready")))[0] != 200:
                await asyncio.sleep(0.2)

    async def closed(self, seconds: float) -> float:
        """Requests a second of senders each of which waits for its answer."""
        until, done = time.perf_counter() + seconds, Counter[int]()

        async def sender(number: int) -> None:
            while time.perf_counter() < until:
                status, _ = await self.ask(number + done[200] * AT_ONCE)
                done[status] += 1

        await asyncio.gather(*(sender(number) for number in range(AT_ONCE)))
        return done[200] / seconds

    async def poisson(self, rate: float, seconds: float) -> Answers:
        """Requests that come at random, so many a second in the mean."""
        rng = np.random.default_rng(0)
        tasks: list[asyncio.Task[tuple[int, float]]] = []
        at = began = time.perf_counter()
        while at < began + seconds:
            at += rng.exponential(1 / rate)
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            tasks.append(asyncio.create_task(self.ask(len(tasks), at)))
        return list(await asyncio.gather(*tasks))

    async def ask(self, number: int, due: float | None = None) -> tuple[int, float]:
        """Status of a request, and the seconds since it was due: by default now."""
        return await self.send(self.requests[number % len(self.requests)], due)

    async def send(self, request: bytes, due: float | None = None) -> tuple[int, float]:
        """Status and seconds; 0 where there was no answer."""
        began, answer = due or time.perf_counter(), b""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(request)
            answer = await reader.read(-1)
            writer.close()
        except OSError:
            pass
        status = int(answer[9:12]) if answer else 0
        return status, time.perf_counter() - began
