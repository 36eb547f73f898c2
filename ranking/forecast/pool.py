"""Shards of a sample: all in this process, or each in a worker process that may die.

A query goes to all workers, and their sums are added. A worker that does not answer in time is
killed and started anew; until it has loaded its shard again, the others answer for it with wider
intervals (`ranking.forecast.sums.combine_shards`).
"""

import asyncio
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from etl.errors import TemporaryError
from etl.tables.lake import Lake
from ranking.forecast.shard import Query, Shard
from ranking.forecast.sums import SampleSums, combine_shards
from ranking.forecast.tables import (
    SAMPLE,
    ForecastTables,
    read_sample,
    read_tables,
    table_versions,
)
from ranking.forecast.worker import ANSWER, QUERY, ErrorMessage, SumsMessage, WorkerSettings

ANSWER_SECONDS = 2.0
DRAIN_SECONDS = 60.0  # for the requests in flight, each of a few queries
RESTART_SECONDS = 1.0  # between two attempts to start a worker
log = logging.getLogger("uvicorn.error")


@dataclass(frozen=True)
class LocalShard:
    """The complete sample in this process."""

    shard: Shard

    async def sums(self, query: Query) -> SampleSums:
        """The sums of the sample."""
        return self.shard.sums(query)


def open_forecast(lake: Lake) -> tuple[ForecastTables, LocalShard]:
    """The tables of the latest build, with its sample in this process."""
    versions = table_versions(lake)
    sample = read_sample(lake, versions[SAMPLE])
    tables = read_tables(lake, sample, versions)
    return tables, LocalShard(Shard(lake.spec, sample, tables.domain))


class WorkerProcess:
    """A worker process, which is started again whenever it ends."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.process: asyncio.subprocess.Process | None = None
        self.is_ready = asyncio.Event()
        self._lock = asyncio.Lock()
        self._supervisor = asyncio.create_task(self._supervise())

    async def ask(self, line: bytes) -> SumsMessage | None:
        """The answer to a query; None if the worker does not answer.

        Raises:
            RuntimeError: The worker cannot answer this query.
        """
        async with self._lock:
            process = self.process
            if process is None or not self.is_ready.is_set():
                return None
            assert process.stdin and process.stdout
            try:
                process.stdin.write(line)
                async with asyncio.timeout(ANSWER_SECONDS):
                    answer = await process.stdout.readline()
            except (TimeoutError, OSError, asyncio.CancelledError) as error:
                # An answer that comes later would be taken for that of the next query.
                with suppress(ProcessLookupError):
                    process.kill()
                self.is_ready.clear()
                if isinstance(error, asyncio.CancelledError):
                    raise
                return None
            is_complete = answer.endswith(b"\n")  # not if the worker was killed as it wrote
            if not is_complete:
                return None
        message = ANSWER.validate_json(answer)
        if isinstance(message, ErrorMessage):
            raise RuntimeError(f"a forecast worker cannot answer a query: {message.error}")
        return message

    async def close(self) -> None:
        """Stop the process."""
        self._supervisor.cancel()
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()

    async def _supervise(self) -> None:
        number, shards = self.settings.shard
        while True:
            reason = "ended"
            try:
                await self._run_process()
            except OSError as error:  # for example too many open files, or no memory for a process
                reason = f"cannot be started ({error})"
            log.warning("forecast worker %d of %d %s; it is retried", number + 1, shards, reason)
            await asyncio.sleep(RESTART_SECONDS)

    async def _run_process(self) -> None:
        """Start the process, and return when it has ended."""
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "ranking.forecast.worker"),
            self.settings.model_dump_json(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 20,
        )
        assert self.process.stdout
        if await self.process.stdout.readline() == b"ready\n":
            self.is_ready.set()
        await self.process.wait()
        self.is_ready.clear()


class WorkerPool:
    """Worker processes, each with one shard of the sample."""

    def __init__(self, settings: WorkerSettings, num_workers: int) -> None:
        """Start the workers; `settings` are those of any of them."""
        self.workers = [
            WorkerProcess(settings.model_copy(update={"shard": (number, num_workers)}))
            for number in range(num_workers)
        ]
        self._num_requests = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Count a request, which may ask several queries, until it ends."""
        self._num_requests += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._num_requests -= 1
            if self._num_requests == 0:
                self._is_idle.set()

    async def drain(self) -> None:
        """Stop all workers once no request uses them, or after DRAIN_SECONDS."""
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_SECONDS):
                    await self._is_idle.wait()
        finally:
            await self.close()

    async def wait_until_ready(self) -> None:
        """Return once all workers have loaded their shards."""
        await asyncio.gather(*(worker.is_ready.wait() for worker in self.workers))

    async def sums(self, query: Query) -> SampleSums:
        """The sums of all shards, estimated from those that answer.

        Raises:
            TemporaryError: No worker answers.
            RuntimeError: A worker cannot answer this query.
        """
        line = QUERY.dump_json(query) + b"\n"
        answers = await asyncio.gather(*(worker.ask(line) for worker in self.workers))
        parts = [answer.to_sums() for answer in answers if answer is not None]
        if not parts:
            raise TemporaryError("no worker has loaded its part of the sample; retry in a second")
        return combine_shards(parts, len(self.workers))

    async def close(self) -> None:
        """Stop all workers."""
        await asyncio.gather(*(worker.close() for worker in self.workers))
