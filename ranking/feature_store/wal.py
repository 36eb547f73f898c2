"""The write-ahead log of posted events and attributes, and the live store that applies it.

Entries are numbered consecutively, in the transaction that writes them. The log is stored next to
the stores of a lake, so an acknowledged entry survives a handover to the next store and a kill of
any process: every store applies the entries that it does not have yet.
"""

import json
import logging
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, takewhile
from pathlib import Path
from threading import Lock
from typing import IO, Any, Literal

from etl.errors import UserError
from etl.event_time import format_utc, is_after_today
from etl.spec.model import DataSpec
from etl.spec.units import MICROS
from etl.tables.pointer import VersionPointer
from etl.tables.uri import StoragePath, local_cache_path, resolve_uri
from ranking.feature_store.attributes import AttributeVersion, upsert_item, upsert_user
from ranking.feature_store.events import Event, ingest_event, validate_event
from ranking.feature_store.storage import (
    STORAGE_ERRORS,
    Database,
    Txn,
    compact_environment,
    lock_usage,
    open_environment,
)
from ranking.feature_store.store import FeatureStore, open_store

log = logging.getLogger(__name__)
WAL_TABLES = ("meta", "entries", "ids")
IDENTITY_KEY, LAST_ENTRY_KEY = b"identity", b"last"
TRIM_BATCH_SIZE = 10_000  # entries per transaction
APPLY_BATCH_SIZE = 1000  # entries per transaction
EntryKind = Literal["event", "user", "item"]


@dataclass(frozen=True)
class WalEntry:
    """A posted event or attribute version, and when it was received (µs)."""

    kind: EntryKind
    received_ts: int
    payload: Event | AttributeVersion

    @property
    def retention_ts(self) -> int:
        """The time (µs) that decides when the tables are final for it: an event's own time."""
        return self.payload.event_ts if isinstance(self.payload, Event) else self.received_ts

    @property
    def user_id(self) -> str | None:
        """The user whom the entry is about; None for an item."""
        if isinstance(self.payload, Event):
            return self.payload.user
        return self.payload.entity_id if self.kind == "user" else None

    def to_json(self) -> bytes:
        """Serialize to JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, stored: bytes) -> "WalEntry":
        """Deserialize the output of `to_json`."""
        fields: Mapping[str, Any] = json.loads(stored)
        payload_type = Event if fields["kind"] == "event" else AttributeVersion
        return cls(fields["kind"], fields["received_ts"], payload_type(**fields["payload"]))


@dataclass(frozen=True)
class WriteAheadLog(Database):
    """The log of a lake; `identity` distinguishes it from a log that replaced it."""

    identity: bytes
    usage_lock: IO[bytes]

    def close(self) -> None:
        """Close the files, and let the log be compacted."""
        super().close()
        self.usage_lock.close()

    def append(
        self, batches: Sequence[Sequence[WalEntry]], is_in_tables: Callable[[Event], bool]
    ) -> list[int]:
        """Write entries in one transaction and return how many of each batch were new.

        An event is new unless the log has its id, or `is_in_tables` is true of it.
        """
        with self.write_transaction() as txn:
            return [
                sum(_append_entry(txn, entry, is_in_tables) for entry in batch) for batch in batches
            ]

    def last_entry_number(self) -> int:
        """The number of the most recent entry; 0 before the first."""
        with self.read_transaction() as txn:
            return _last_entry_number(txn)

    def entries_after(self, entry_number: int) -> Iterator[tuple[int, WalEntry]]:
        """Yield the numbers and entries that follow an entry, in order."""
        with self.read_transaction() as txn:
            for key, value in txn.iterate_from("entries", _entry_key(entry_number + 1)):
                yield int.from_bytes(key, "big"), WalEntry.from_json(value)

    def trim(self, final_before_ts: int) -> None:
        """Remove entries from the start of the log, while they are older than a time (µs)."""
        while self._trim_batch(final_before_ts):
            pass

    def erase_users(self, users: Collection[str], until_ts: int) -> int:
        """Remove the entries of users that were received until a time (µs); returns how many."""
        with self.read_transaction() as txn:
            stored = ((k, WalEntry.from_json(v)) for k, v in txn.iterate_from("entries", b""))
            found = [
                (key, entry)
                for key, entry in stored
                if entry.user_id in users and entry.received_ts <= until_ts
            ]
        for start in range(0, len(found), TRIM_BATCH_SIZE):
            with self.write_transaction() as txn:
                for key, entry in found[start : start + TRIM_BATCH_SIZE]:
                    _delete_entry(txn, key, entry)
        return len(found)

    def _trim_batch(self, final_before_ts: int) -> int:
        with self.write_transaction() as txn:
            stored = (
                (key, WalEntry.from_json(value)) for key, value in txn.iterate_from("entries", b"")
            )
            final = takewhile(lambda pair: pair[1].retention_ts < final_before_ts, stored)
            batch = list(islice(final, TRIM_BATCH_SIZE))
            for key, entry in batch:
                _delete_entry(txn, key, entry)
        return len(batch)


def open_wal(folder: Path) -> WriteAheadLog:
    """Open the log of a folder, or create an empty one; waits while it is compacted."""
    usage_lock = lock_usage(folder, exclusive=False)
    try:
        env, tables = open_environment(folder, WAL_TABLES, metasync=True)
        with Database(env, tables).write_transaction() as txn:
            identity = txn.get("meta", IDENTITY_KEY)
            if not identity:
                identity = uuid.uuid4().bytes
                txn.put("meta", IDENTITY_KEY, identity)
    except BaseException:
        usage_lock.close()
        raise
    return WriteAheadLog(env, tables, identity, usage_lock)


def compact_wal(folder: Path) -> bool:
    """Rewrite the log without free pages, which keep removed entries; False while it is open."""
    return compact_environment(folder, WAL_TABLES)


def _append_entry(txn: Txn, entry: WalEntry, is_in_tables: Callable[[Event], bool]) -> bool:
    number = _entry_key(_last_entry_number(txn) + 1)
    if isinstance(entry.payload, Event):
        keys = entry.payload.id_keys
        if txn.get("ids", keys[-1]) or is_in_tables(entry.payload):
            return False
        txn.put_many("ids", [(key, number) for key in keys])
    txn.put("entries", number, entry.to_json())
    txn.put("meta", LAST_ENTRY_KEY, number)
    return True


def _delete_entry(txn: Txn, key: bytes, entry: WalEntry) -> None:
    txn.delete("entries", key)
    if isinstance(entry.payload, Event):
        for id_key in entry.payload.id_keys:
            if txn.get("ids", id_key) == key:  # not that of a later event of another log
                txn.delete("ids", id_key)


def _last_entry_number(txn: Txn) -> int:
    return int.from_bytes(txn.get("meta", LAST_ENTRY_KEY), "big")


def _entry_key(number: int) -> bytes:
    return number.to_bytes(8, "big")


def feature_store_pointer(lake: str) -> VersionPointer:
    """The pointer to a lake's live store; for a lake in an object store, that of this machine."""
    return VersionPointer(local_cache_path(resolve_uri(lake, "feature_store")), max_previous=1)


class FeatureStoreHandle:
    """The live store of a lake, kept up to date with the write-ahead log."""

    def __init__(self, lake: str, spec: DataSpec) -> None:
        """Open the store and the log.

        Raises:
            UserError: There is no store, its data ends in the future, or it was built with another
                spec.
        """
        self._pointer = feature_store_pointer(lake)
        folder = self._pointer.live_folder
        if folder is None:
            raise UserError(f"{lake} holds no feature store; run `gemline rank materialize` first")
        self._spec, self._open_lock = spec, Lock()
        self.wal = open_wal(local_cache_path(resolve_uri(lake, "feature_store_wal")))
        try:
            self.store = self._open(folder)
        except BaseException:
            self.wal.close()
            raise

    def write(self, batches: Sequence[Sequence[WalEntry]]) -> list[int]:
        """Append entries in one transaction, apply them, and return how many of each were new.

        Raises:
            StorageFullError: The log, the store or the disk is full.
        """
        store = self.store
        with store.read_transaction() as txn:
            num_new = self.wal.append(batches, lambda event: _is_in_tables(txn, event))
        apply_wal(store, self.wal)
        return num_new

    def open_newer(self) -> FeatureStore | None:
        """Open the store that the pointer names and apply the log; None if it is already open.

        Raises:
            UserError: It cannot be opened, or there is none any more.
        """
        with self._open_lock:
            folder = self._pointer.live_folder
            if folder is None:
                raise UserError(
                    f"the feature store in {self._pointer.folder} was removed: run `gemline rank "
                    "materialize` and restart the service, which answers from the removed one"
                )
            if local_cache_path(folder) == self.store.folder:
                return None
            return self._open(folder)

    def handover(self, new_store: FeatureStore) -> FeatureStore:
        """Switch to a newer store; return the old one, to be closed when nobody reads it."""
        old, self.store = self.store, new_store
        return old

    def sync_with_wal(self) -> None:
        """Apply what other processes have logged, and release reader slots of killed ones."""
        apply_wal(self.store, self.wal)
        for database in (self.store, self.wal):
            database.clear_stale_readers()

    def close(self) -> None:
        """Close the store and the log; waits for another thread in `open_newer`."""
        with self._open_lock:
            self.store.close()
            self.wal.close()

    def _open(self, folder: StoragePath) -> FeatureStore:
        store = open_store(local_cache_path(folder), self._spec)
        try:
            _require_past(store)
            apply_wal(store, self.wal)
            self.wal.trim(store.final_before_ts)
        except BaseException:
            store.close()
            raise
        return store


def _require_past(store: FeatureStore) -> None:
    """Raise UserError if the data of a store ends in the future: it would skip new entries."""
    if is_after_today(store.spec, store.data_until):
        until = format_utc(store.data_until)
        raise UserError(
            f"the feature store in {store.folder} has data until {until} UTC, which is in the "
            "future: run `gemline rank materialize` with an earlier --data-until"
        )


def apply_wal(store: FeatureStore, wal: WriteAheadLog) -> None:
    """Apply each entry of the log that a store does not have yet, once and in order.

    The number of the last applied entry is written in the same transaction as its effects, so that
    a kill at any moment neither loses an entry nor applies it twice.
    """
    while _wal_lag(store, wal):
        with store.write_transaction() as txn:
            last_entry = wal.last_entry_number()
            applied = store.last_applied_entry(txn, wal.identity)
            entries = list(islice(wal.entries_after(applied), APPLY_BATCH_SIZE))
            for _, entry in entries:
                _apply_entry(store, txn, entry)
            applied = entries[-1][0] if entries else last_entry  # entries between were trimmed
            store.set_last_applied_entry(txn, wal.identity, applied)


def _wal_lag(store: FeatureStore, wal: WriteAheadLog) -> int:
    """By how many entry numbers a store is behind the log."""
    with store.read_transaction() as txn:
        return wal.last_entry_number() - store.last_applied_entry(txn, wal.identity)


def _apply_entry(store: FeatureStore, txn: Txn, entry: WalEntry) -> None:
    """Apply an entry, unless it is in the tables that the store was built from.

    An entry that cannot be applied is logged and skipped: those that follow it must be applied.
    """
    if entry.retention_ts < store.final_before_ts:
        return
    payload, now = entry.payload, entry.received_ts // MICROS["s"]
    try:
        if isinstance(payload, Event):
            if not _is_in_tables(txn, payload):
                validate_event(store.spec, payload)
                ingest_event(store, txn, payload)
        elif entry.kind == "user":
            upsert_user(store, txn, payload, now)
        else:
            upsert_item(store, txn, payload, now, is_posted=True)
    except UserError as error:  # the spec has changed since
        log.warning("an entry of the write-ahead log no longer fits the spec: %s", error)
    except STORAGE_ERRORS:
        raise
    except Exception:
        log.exception("an entry of the write-ahead log cannot be applied and is skipped")


def _is_in_tables(txn: Txn, event: Event) -> bool:
    """Whether the tables that a store was built from have an event."""
    return bool(txn.get("event_ids", event.id_keys[-1]))
