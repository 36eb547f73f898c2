"""The state and operations of a worker process of the service.

Requests are ranked one after the other on the event loop. Posted events and attributes are
committed by a thread, in groups.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import TypeVar

from prometheus_client import Counter

from etl.errors import UserError
from etl.raw_records import attributes_of_record
from etl.spec import load_spec
from etl.spec.model import DataSpec
from etl.spec.sources import AttributeSource
from etl.spec.units import MICROS
from etl.tables.code_registry import assign_codes, read_codes
from etl.tables.declared_columns import counted_columns
from ranking.feature_store.attributes import AttributeVersion, validate_valid_from, validate_version
from ranking.feature_store.encoded_attributes import AttributeValues
from ranking.feature_store.events import Event, are_ids_by_log, validate_event
from ranking.feature_store.request import (
    RankRequest,
    check_context_names,
    check_event_attribute_names,
)
from ranking.feature_store.store import FeatureStore
from ranking.feature_store.wal import EntryKind, FeatureStoreHandle, WalEntry, apply_wal
from ranking.serving.admission import BodyBuffer, WorkQueue
from ranking.serving.loaded_rankers import LoadedRankers, RankersBySurface, error_message
from ranking.serving.rank import rank_request
from ranking.serving.schemas import (
    EventPayload,
    EventsRequest,
    EventsResponse,
    ItemAttributesRequest,
    RankRequestBody,
    RankResponse,
    UserAttributesRequest,
    WorkerStatus,
)
from ranking.serving.settings import Settings

log = logging.getLogger("uvicorn.error")
EVENTS_ACCEPTED = Counter("gemline_events_accepted", "New events that were accepted")

T = TypeVar("T")
EntryBatch = Sequence[WalEntry]


class GroupCommit:
    """Commits batches of entries in a thread, while the event loop continues.

    Batches that arrive during a commit go into the next one together. A caller resumes after the
    commit that includes its batch.
    """

    def __init__(self, commit: Callable[[Sequence[EntryBatch]], Sequence[int]]) -> None:
        self._commit = commit
        self._executor = ThreadPoolExecutor(1, "commit")
        self._pending: list[tuple[EntryBatch, asyncio.Future[int]]] = []
        self._commit_task: asyncio.Task[None] | None = None

    async def write(self, batch: EntryBatch) -> int:
        """Commit a batch and return the number of new entries; raises errors of the commit."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._pending.append((batch, future))
        if self._commit_task is None or self._commit_task.done():
            self._commit_task = asyncio.create_task(self._commit_pending())
        return await future

    async def run_in_thread(self, work: Callable[[], T]) -> T:
        """Do other work in the thread of the commits, between two of them."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        """Stop the thread after the commit in progress."""
        self._executor.shutdown()

    async def _commit_pending(self) -> None:
        while self._pending:
            group, self._pending = self._pending, []
            futures = [future for _, future in group]
            batches = [batch for batch, _ in group]
            try:
                counts = await self.run_in_thread(partial(self._commit, batches))
            except Exception as error:
                for future in futures:
                    if not future.done():
                        future.set_exception(error)
                continue
            for future, count in zip(futures, counts, strict=True):
                if not future.done():
                    future.set_result(count)


class Worker:
    """The feature store and the rankers that one process serves with."""

    def __init__(self, settings: Settings) -> None:
        """Open the feature store and load the rankers.

        Raises:
            UserError: The lake has no feature store, or one of another spec.
        """
        self.settings = settings
        self.spec = assign_codes(load_spec(settings.spec), read_codes(settings.lake))
        self.feature_store = FeatureStoreHandle(settings.lake, self.spec)
        self.rankers = LoadedRankers(
            settings.lake, self.feature_store.store.metadata, settings.use_compiled
        )
        self.committer = GroupCommit(self.feature_store.write)
        self._handover_lock = Lock()  # a store and its rankers are replaced together
        self.work_queue, self.body_buffer = WorkQueue(settings.limits), BodyBuffer(settings.limits)
        self.feature_store_error: str | None = None

    async def refresh(self) -> None:
        """Load a newer feature store and newer rankers; failures are reported in `status`."""
        try:
            await self._refresh_feature_store()
            self.feature_store_error = None
        except Exception as error:  # LMDB and file systems raise their own
            message = error_message(error)
            if self.feature_store_error != message:
                log.error("feature store: %s", message)
            self.feature_store_error = message
        await asyncio.to_thread(self.rankers.refresh, self.feature_store.store.metadata)

    async def _refresh_feature_store(self) -> None:
        try:
            newer = await asyncio.to_thread(self.feature_store.open_newer)
            if newer:
                await self._serve_store(newer)
        finally:
            await self.committer.run_in_thread(self.feature_store.sync_with_wal)

    async def _serve_store(self, newer: FeatureStore) -> None:
        """Switch to a newer store; raises UserError if a served surface would lose its ranker."""
        name, rankers = newer.folder.name, None
        try:
            rankers = await asyncio.to_thread(self.rankers.for_store, newer.metadata)
        except UserError as error:
            raise UserError(f"{name} is not served: {error}") from error
        finally:
            if rankers is None:
                newer.close()
        old = await self.committer.run_in_thread(partial(self._hand_over, newer, rankers))
        # Requests are ranked on this event loop: none reads the old store any more.
        await self.committer.run_in_thread(old.close)

    def _hand_over(self, newer: FeatureStore, rankers: RankersBySurface) -> FeatureStore:
        """Switch to a newer store and rankers that fit it; returns the old store.

        It runs between two commits, so that the newer store has all that was acknowledged.
        """
        try:
            apply_wal(newer, self.feature_store.wal)
        except BaseException:
            newer.close()
            raise
        with self._handover_lock:
            self.rankers.replace(rankers)
            return self.feature_store.handover(newer)

    def rank(self, body: RankRequestBody) -> RankResponse:
        """Rank the candidates of a request as of now."""
        with self._handover_lock:
            ranker = self.rankers.for_surface(body.surface)
            store = self.feature_store.store
        request = RankRequest(
            user=body.user,
            surface=body.surface,
            candidates=body.candidates,
            context=requested_context(self.spec, body),
            as_of=self.settings.now_us() // MICROS["s"],
        )
        return rank_request(ranker, store, self.spec, request)

    async def ingest_events(self, body: EventsRequest) -> EventsResponse:
        """Commit events, all or none of them."""
        now = self.settings.now_us()
        counted = counted_columns(self.spec)
        events = [posted_event(self.spec, payload, now, counted) for payload in body.events]
        for event in events:
            validate_event(self.spec, event)
        accepted = await self._commit([WalEntry("event", now, event) for event in events])
        EVENTS_ACCEPTED.inc(accepted)
        return EventsResponse(accepted=accepted)

    async def upsert_user_attributes(self, body: UserAttributesRequest) -> None:
        """Commit a version of a user's attributes."""
        now = self.settings.now_us()
        valid_from = posted_valid_from(self.spec, "user", body.valid_from, now)
        version = AttributeVersion(body.user, valid_from, body.attributes)
        await self._upsert_attributes("user", version, now)

    async def upsert_item_attributes(self, body: ItemAttributesRequest) -> None:
        """Commit a version of an item's attributes, bid and goal."""
        now = self.settings.now_us()
        version = AttributeVersion(
            body.item,
            posted_valid_from(self.spec, "item", body.valid_from, now),
            body.attributes,
            body.bid,
            body.goal,
            body.target_roas,
        )
        await self._upsert_attributes("item", version, now)

    async def _upsert_attributes(
        self, entity: EntryKind, version: AttributeVersion, now: int
    ) -> None:
        validate_version(self.feature_store.store.layout, entity, version)
        await self._commit([WalEntry(entity, now, version)])

    async def _commit(self, entries: list[WalEntry]) -> int:
        with self.work_queue.admit(len(entries)):
            return await self.committer.write(entries)

    @property
    def status(self) -> WorkerStatus:
        """The loaded rankers and features of the worker, and load failures."""
        labels_until, now = self.rankers.labels_until, self.settings.now_us() // MICROS["s"]
        return WorkerStatus(
            spec_hash=self.spec.hash,
            features_until=self.feature_store.store.data_until,
            ranker_versions=self.rankers.versions,
            labels_until=labels_until,
            label_age_seconds={surface: now - until for surface, until in labels_until.items()},
            newest_label_age_seconds={
                surface: {objective: now - time for objective, time in times.items()}
                for surface, times in self.rankers.newest_labels.items()
            },
            ranker_errors=self.rankers.errors,
            feature_store_error=self.feature_store_error,
        )

    def close(self) -> None:
        """Finish the commit in progress and close the feature store."""
        self.committer.close()
        self.feature_store.close()


def requested_context(
    spec: DataSpec, body: RankRequestBody
) -> AttributeValues | Sequence[AttributeValues]:
    """The context of a request, or that of its raw record; raises UserError if it has both."""
    if body.record is None:
        if body.source is not None:
            raise UserError("`source` names the log of `record`: give the record, too")
        return body.context
    if body.context:
        raise UserError("give `context` or `record`, not both")
    return attributes_of_record(spec, body.source, body.record)


def posted_valid_from(spec: DataSpec, entity: EntryKind, stated_ms: int | None, now: int) -> int:
    """The time (µs) from which a posted version is valid, with the delay of its source as offline.

    It is the stated time in milliseconds, by default `now` (µs), but not before the current day
    began unless all sources of the entity's attributes are static, plus their largest `delay`.
    Raises UserError if the stated time is implausible.
    """
    valid_from = now if stated_ms is None else stated_ms * MICROS["ms"]
    validate_valid_from(valid_from, now)
    declared = spec.sources.values()
    sources = [s for s in declared if isinstance(s, AttributeSource) and s.entity == entity]
    if not all(source.static for source in sources):
        today = spec.day_of(now // MICROS["s"])
        valid_from = max(valid_from, spec.day_start(today) * MICROS["s"])
    return valid_from + max((source.delay for source in sources), default=0) * MICROS["s"]


def posted_event(
    spec: DataSpec, payload: EventPayload, now: int, counted: Collection[str]
) -> Event:
    """The event of a payload; of its context and attributes, the `counted` columns are kept.

    Raises UserError if the spec does not have an attribute of the context or the event.
    """
    check_context_names(spec, payload.context, f"event {payload.event_id}: ")
    check_event_attribute_names(spec, payload.attributes, f"event {payload.event_id}: ")
    event_ts = now if payload.event_time is None else payload.event_time * MICROS["ms"]
    return Event(
        event_id=payload.event_id,
        user=payload.user,
        item=payload.item,
        surface=payload.surface,
        type=payload.type,
        event_ts=event_ts,
        ingest_ts=now,
        dwell_ms=payload.dwell_ms,
        value=payload.value,
        context={
            name: value for name, value in payload.context.items() if f"ctx_{name}" in counted
        },
        attributes={
            name: value for name, value in payload.attributes.items() if f"event_{name}" in counted
        },
        log=posted_log(spec, payload),
    )


def posted_log(spec: DataSpec, payload: EventPayload) -> str | None:
    """The log in which the id of an event is unique; None if it is unique in all, or not stated.

    Raises UserError if `source` is no log of events.
    """
    if payload.source is not None and payload.source not in spec.log_sources:
        known = ", ".join(spec.log_sources)
        raise UserError(f"{payload.source} is no log of events; there is {known}")
    is_by_log = are_ids_by_log(spec) and payload.type != spec.impression_type
    return payload.source if is_by_log else None
