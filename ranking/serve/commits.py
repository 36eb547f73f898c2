"""Commits of what requests post: in a thread, in groups."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from ranking.online.log import WalEntry

T = TypeVar("T")
Batch = Sequence[WalEntry]


class GroupCommit:
    """Writes batches of entries in a thread of its own; the event loop goes on meanwhile.

    All batches that wait while one commit is written go into the next one together, and each
    caller goes on after the commit that holds its batch.
    """

    def __init__(self, commit: Callable[[Sequence[Batch]], Sequence[int]]) -> None:
        self._commit = commit
        self._thread = ThreadPoolExecutor(1, "commit")
        self._waiting: list[tuple[Batch, asyncio.Future[int]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def write(self, batch: Batch) -> int:
        """Commit a batch; returns how many of its entries were new. Raises what the commit does."""
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((batch, done))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_all())
        return await done

    async def run(self, work: Callable[[], T]) -> T:
        """Do other work in the thread of the commits, between two of them."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        """End the thread when what it has begun is written."""
        self._thread.shutdown()

    async def _write_all(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting, []
            batches = [batch for batch, _ in group]
            try:
                counts = await self.run(partial(self._commit, batches))
            except Exception as error:
                for _, done in group:
                    if not done.done():
                        done.set_exception(error)
            else:
                for (_, done), count in zip(group, counts, strict=True):
                    if not done.done():
                        done.set_result(count)
