"""One process of the service: it ranks one request after the other, and commits what is posted."""

import asyncio
import logging

import numpy as np
from prometheus_client import Counter

from etl.spec import load_spec
from etl.spec.units import MICROS
from etl.tables.codes import bind, read_codes
from ranking.auction import Auction, Exclusion, Result, ranked
from ranking.online.assemble import Assembled, Assembler
from ranking.online.attributes import Version, check_time, check_version
from ranking.online.feed import Event, check_event
from ranking.online.live import Live
from ranking.online.log import Kind, WalEntry
from ranking.online.request import Asked
from ranking.serve.admission import BodyBuffer, WorkQueue
from ranking.serve.bodies import (
    EventBody,
    EventsBody,
    ExcludedBody,
    ItemBody,
    RankBody,
    RankedBody,
    RankingBody,
    StateBody,
    TakenBody,
    UserBody,
)
from ranking.serve.commits import GroupCommit
from ranking.serve.rankers import Rankers, sentence_of
from ranking.serve.settings import Settings

log = logging.getLogger("uvicorn.error")
EVENTS = Counter("gemline_events", "New events that were taken")


class Worker:
    """What one process serves with."""

    def __init__(self, settings: Settings) -> None:
        """Raises UserError where the lake has no store."""
        self.settings = settings
        self.spec = bind(load_spec(settings.spec), read_codes(settings.lake))
        self.live = Live(settings.lake, self.spec)
        self.rankers = Rankers(settings.lake, self.live.store.meta, settings.compiled)
        self.commits = GroupCommit(self.live.write)
        self.queue, self.buffer = WorkQueue(settings.limits), BodyBuffer(settings.limits)
        self.features_fault: str | None = None

    async def renew(self) -> None:
        """Load newer features and newer rankers; what cannot be loaded is reported in the state."""
        try:
            await self._renew_store()
            self.features_fault = None
        except Exception as error:  # LMDB and file systems raise their own kinds
            if self.features_fault != sentence_of(error):
                log.error("online features: %s", sentence_of(error))
            self.features_fault = sentence_of(error)
        await asyncio.to_thread(self.rankers.renew, self.live.store.meta)

    async def _renew_store(self) -> None:
        store = await asyncio.to_thread(self.live.newer)
        if store:
            old = self.live.swap(store)
            await self.commits.run(old.close)
        await self.commits.run(self.live.keep_up)

    def rank(self, body: RankBody) -> RankingBody:
        """The ranking of a request as of now."""
        ranker = self.rankers.of(body.surface)
        as_of = self.settings.now() // MICROS["s"]
        asked = Asked(body.user, body.surface, as_of, body.candidates, body.context)
        inputs = Assembler(self.live.store, ranker.manifest.reads)(asked)
        state = ranker.state(inputs.requests)
        p = ranker.probabilities(state, inputs.candidates)[inputs.candidates.present]
        one = np.zeros(len(p), np.int64)
        auction = Auction(self.spec, body.surface)
        result = auction(p, inputs.bids, inputs.goals, one, inputs.advertisers)
        ranking = [
            RankedBody.model_construct(
                place=one.place,
                item=body.candidates[one.row],
                expected_value=one.expected_value,
                price=one.price,
                probabilities=dict(zip(ranker.objectives, one.probabilities, strict=True)),
            )
            for one in ranked(p, result)
        ]
        return RankingBody.model_construct(
            ranker=ranker.manifest.version,
            ranking=ranking,
            excluded=_excluded(body.candidates, inputs, result),
        )

    async def take(self, body: EventsBody) -> TakenBody:
        """Commit events of now."""
        now = self.settings.now()
        events = [_event(one, now) for one in body.events]
        for event in events:
            check_event(self.spec, event)
        taken = await self._commit([WalEntry("event", now, event) for event in events])
        EVENTS.inc(taken)
        return TakenBody(taken=taken)

    async def update_user(self, body: UserBody) -> None:
        """Commit a version of a user."""
        now = self.settings.now()
        version = Version(body.name, _valid_from(body, now), body.values)
        await self._update("user", version, now)

    async def update_item(self, body: ItemBody) -> None:
        """Commit a version of an item, and what is bid for it."""
        now = self.settings.now()
        version = Version(body.name, _valid_from(body, now), body.values, body.bid, body.goal)
        await self._update("item", version, now)

    async def _update(self, entity: Kind, version: Version, now: int) -> None:
        check_version(self.live.store.layout, entity, version)
        await self._commit([WalEntry(entity, now, version)])

    async def _commit(self, entries: list[WalEntry]) -> int:
        with self.queue.admitted(len(entries)):
            return await self.commits.write(entries)

    @property
    def state(self) -> StateBody:
        """What it serves with, and what is wrong."""
        return StateBody(
            spec=self.spec.hash,
            features_until=self.live.store.landed,
            rankers=self.rankers.versions,
            ranker_faults=self.rankers.faults,
            features_fault=self.features_fault,
        )

    def close(self) -> None:
        """Write what is begun, then close the files."""
        self.commits.close()
        self.live.close()


def _valid_from(body: UserBody | ItemBody, now: int) -> int:
    """The time (µs) from which a posted version holds; raises UserError for one out of range."""
    if body.valid_from is None:
        return now
    since = body.valid_from * MICROS["ms"]
    check_time(since, now)
    return since


def _excluded(candidates: list[str], inputs: Assembled, result: Result) -> list[ExcludedBody]:
    """The candidates that take no part in the auction."""
    unbid = result.exclusions == Exclusion.NO_BID
    reasons = np.where(unbid & ~inputs.known, Exclusion.UNKNOWN_ITEM, result.exclusions)
    return [
        ExcludedBody.model_construct(
            item=candidates[row], reason=Exclusion(int(reasons[row])).name.lower()
        )
        for row in np.flatnonzero(reasons)
    ]


def _event(body: EventBody, now: int) -> Event:
    happened = now if body.event_time is None else body.event_time * MICROS["ms"]
    return Event(
        event_id=body.event_id, user=body.user, item=body.item, surface=body.surface,
        type=body.type, event_ts=happened, ingest_ts=now, dwell_ms=body.dwell_ms,
    )  # fmt: skip
