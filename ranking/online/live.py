"""The store that answers now: it has all that the log has, and a new one takes over each day."""

import logging
from collections.abc import Sequence
from itertools import islice
from threading import Lock

from etl.errors import UserError
from etl.spec.model import DataSpec
from etl.spec.units import MICROS
from etl.tables.place import Place, here, place
from etl.tables.pointer import Pointer
from ranking.online.attributes import upsert_attributes
from ranking.online.database import Txn
from ranking.online.feed import Event, check_event, ingest_event
from ranking.online.log import WalEntry, WriteAheadLog, id_of, open_log
from ranking.online.store import Store, open_store

log = logging.getLogger(__name__)
APPLIED_AT_ONCE = 1000  # entries of a transaction


def stores(lake: str) -> Pointer:
    """Which of a lake's stores is to answer; each machine has its own of an object store."""
    return Pointer(here(place(lake, "online")), remembered=1)


class Live:
    """The store that a lake's pointer names, kept up with the log."""

    def __init__(self, lake: str, spec: DataSpec) -> None:
        """Open both. Raises UserError where there is no store, or one of another spec."""
        self._pointer = stores(lake)
        folder = self._pointer.target
        if folder is None:
            raise UserError(f"{lake} holds no online features; run `gemline rank store` first")
        self._spec, self._opening = spec, Lock()
        self.log = open_log(here(place(lake, "online_log")))
        try:
            self.store = self._opened(folder)
        except BaseException:
            self.log.close()
            raise

    def write(self, batches: Sequence[Sequence[WalEntry]]) -> list[int]:
        """Log entries in one transaction, then apply them; returns how many of each were new.

        Raises StorageFullError where there is no room.
        """
        store = self.store
        with store.reading() as txn:
            new = self.log.append(batches, lambda event: _is_stored(txn, event))
        catch_up(store, self.log)
        return new

    def newer(self) -> Store | None:
        """The store that the pointer names by now, with all that is logged; None if it is this one.

        Raises UserError where it cannot be opened.
        """
        with self._opening:
            folder = self._pointer.target
            if folder is None or here(folder) == self.store.folder:
                return None
            return self._opened(folder)

    def swap(self, new: Store) -> Store:
        """Answer from a newer store; returns the one before, to be closed when nobody reads it."""
        old, self.store = self.store, new
        return old

    def keep_up(self) -> None:
        """Apply what other processes have logged, and free what killed ones have held."""
        catch_up(self.store, self.log)
        for database in (self.store, self.log):
            database.clear_stale_readers()

    def close(self) -> None:
        """Close the files, when a newer store that another thread opens is there."""
        with self._opening:
            self.store.close()
            self.log.close()

    def _opened(self, folder: Place) -> Store:
        store = open_store(here(folder), self._spec)
        try:
            catch_up(store, self.log)
            self.log.trim(store.settled_ts)
        except BaseException:
            store.close()
            raise
        return store


def catch_up(store: Store, wal: WriteAheadLog) -> None:
    """Apply each entry of the log that a store does not have yet, once, in order.

    The number of the last one is written in the same transaction as its effects, so that a kill
    at any moment neither loses an entry nor applies it twice.
    """
    while _lag(store, wal):
        with store.writing() as txn:
            newest, done = wal.last(), store.applied(txn, wal.identity)
            entries = list(islice(wal.after(done), APPLIED_AT_ONCE))
            for _, entry in entries:
                _apply(store, txn, entry)
            done = entries[-1][0] if entries else newest  # what lies between was trimmed
            store.set_applied(txn, wal.identity, done)


def _lag(store: Store, wal: WriteAheadLog) -> int:
    """How many numbers a store is behind the log."""
    with store.reading() as txn:
        return wal.last() - store.applied(txn, wal.identity)


def _apply(store: Store, txn: Txn, entry: WalEntry) -> None:
    """The effects of an entry, unless the tables that the store was built from have them."""
    if entry.ts < store.settled_ts:
        return
    content = entry.content
    try:
        if not isinstance(content, Event):
            now = entry.received_ts // MICROS["s"]
            upsert_attributes(store, txn, entry.kind, content, now, is_posted=True)
        elif not _is_stored(txn, content):
            check_event(store.spec, content)
            ingest_event(store, txn, content)
    except UserError as error:  # of a spec that has changed since
        log.warning("an entry of the log does not fit the spec any more: %s", error)


def _is_stored(txn: Txn, event: Event) -> bool:
    """Whether the tables that a store was built from have an event."""
    return bool(txn.get("seen", id_of(event)))
