"""One process of the service: it ranks one request after the other, and takes what is told."""

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
from ranking.online.attributes import Version, refuse, tell_items, tell_users
from ranking.online.feed import Event, feed
from ranking.online.live import Live
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
        began = self.settings.now()
        try:
            store = await asyncio.to_thread(self.live.prepare)
        except UserError as error:
            log.error("%s", error)
            store = None
        if store:
            await self.run(lambda: self.live.swap(store, began))
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

    def take(self, body: EventsBody) -> TakenBody:
        """Events of now into the store."""
        now = self.settings.now()
        taken = feed(self.live.store, [_event(one, now) for one in body.events])
        EVENTS.inc(taken)
        return TakenBody(taken=taken)

    def learn(self, entity: str, body: VersionBody) -> None:
        """A version of a user or an item into the store."""
        now, store = self.settings.now(), self.live.store
        since = now if body.valid_from is None else body.valid_from * MICROS["ms"]
        version = Version(body.name, since, body.values, body.bid, body.goal)
        refuse(store.spec, entity, version)
        tell = {"user": tell_users, "item": tell_items}[entity]
        tell(store, [version], now)

    @property
    def state(self) -> StateBody:
        """What it answers with."""
        return StateBody(
            spec=self.spec.hash,
            features_until=self.live.store.landed,
            rankers=self.rankers.versions,
        )

    def close(self) -> None:
        """Let go of the store."""
        self.live.store.close()


def _event(body: EventBody, now: int) -> Event:
    happened = now if body.event_time is None else body.event_time * MICROS["ms"]
    return Event(
        event_id=body.event_id, user=body.user, item=body.item, surface=body.surface,
        type=body.type, event_ts=happened, ingest_ts=now, dwell_ms=body.dwell_ms,
    )  # fmt: skip
