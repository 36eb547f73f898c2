"""One process of the service: it ranks one request after the other, and commits what is posted."""

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from prometheus_client import Counter

from etl.errors import UserError
from etl.spec import load_spec
from etl.spec.units import MICROS
from ranking.auction import Auction
from ranking.online.assemble import Assembler
from ranking.online.attributes import Version, check_version
from ranking.online.feed import Event, check_event
from ranking.online.live import Live
from ranking.online.log import Kind, WalEntry
from ranking.online.request import Asked
from ranking.serve.bodies import (
    EventBody,
    EventsBody,
    RankBody,
    RankedBody,
    RankingBody,
    StateBody,
    TakenBody,
    VersionBody,
)
from ranking.serve.commits import GroupCommit
from ranking.serve.rankers import Rankers
from ranking.serve.settings import Settings

T = TypeVar("T")
log = logging.getLogger("uvicorn.error")
EVENTS = Counter("gemline_events", "New events that were taken")


class Worker:
    """What one process serves with."""

    def __init__(self, settings: Settings) -> None:
        """Raises UserError where the lake has no store."""
        self.settings = settings
        self.spec = load_spec(settings.spec)
        self.live = Live(settings.lake, self.spec)
        self.rankers = Rankers(settings.lake, self.live.store.meta, settings.compiled)
        self.commits = GroupCommit(self.live.write)
        self.waiting = 0
        self._turn = asyncio.Lock()

    async def run(self, work: Callable[[], T]) -> T:
        """Work when it is its turn; between two turns the event loop hears who else is there.

        A thread of its own would share the interpreter with the event loop and slow both. The more
        wait, the more are heard, so that in a crowd the limit is reached; while few do, another
        worker that is free gets them.
        """
        self.waiting += 1
        try:
            async with self._turn:
                for _ in range(1 + self.waiting):
                    await asyncio.sleep(0)
                return work()
        finally:
            self.waiting -= 1

    async def renew(self) -> None:
        """Take up a newer store and newer rankers; what cannot be is told of, and nothing ends."""
        try:
            store = await asyncio.to_thread(self.live.newer)
        except UserError as error:
            log.error("%s", error)
            store = None
        if store:
            old = self.live.swap(store)
            await self.commits.run(old.close)
        await self.commits.run(self.live.keep_up)
        await asyncio.to_thread(self.rankers.renew, self.live.store.meta)

    def rank(self, body: RankBody) -> RankingBody:
        """The ranking of a request as of now."""
        ranker = self.rankers.of(body.surface)
        as_of = self.settings.now() // MICROS["s"]
        asked = Asked(body.user, body.surface, as_of, body.candidates, body.context)
        told = Assembler(self.live.store, ranker.manifest.reads)(asked)
        auction = Auction(self.spec, body.surface)
        found = ranker.rank(told.requests, told.candidates, told.bids, told.goals, auction)
        ranking = [
            RankedBody.model_construct(
                place=one.place,
                item=body.candidates[one.row],
                expected_value=one.expected_value,
                price=one.price,
                probabilities=dict(zip(ranker.objectives, one.probabilities, strict=True)),
            )
            for one in found
        ]
        return RankingBody(ranker=ranker.manifest.version, ranking=ranking)

    async def take(self, body: EventsBody) -> TakenBody:
        """Commit events of now."""
        now = self.settings.now()
        events = [_event(one, now) for one in body.events]
        for event in events:
            check_event(self.spec, event)
        taken = await self._commit([WalEntry("event", now, event) for event in events])
        EVENTS.inc(taken)
        return TakenBody(taken=taken)

    async def learn(self, entity: Kind, body: VersionBody) -> None:
        """Commit a version of a user or an item."""
        now = self.settings.now()
        since = now if body.valid_from is None else body.valid_from * MICROS["ms"]
        version = Version(body.name, since, body.values, body.bid, body.goal)
        check_version(self.live.store.layout, entity, version)
        await self._commit([WalEntry(entity, now, version)])

    async def _commit(self, entries: list[WalEntry]) -> int:
        self.waiting += 1
        try:
            return await self.commits.write(entries)
        finally:
            self.waiting -= 1

    @property
    def state(self) -> StateBody:
        """What it answers with."""
        return StateBody(
            spec=self.spec.hash,
            features_until=self.live.store.landed,
            rankers=self.rankers.versions,
        )

    def close(self) -> None:
        """Write what is begun, then close the files."""
        self.commits.close()
        self.live.close()


def _event(body: EventBody, now: int) -> Event:
    happened = now if body.event_time is None else body.event_time * MICROS["ms"]
    return Event(
        event_id=body.event_id, user=body.user, item=body.item, surface=body.surface,
        type=body.type, event_ts=happened, ingest_ts=now, dwell_ms=body.dwell_ms,
    )  # fmt: skip
