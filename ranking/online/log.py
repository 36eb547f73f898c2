"""The write-ahead log of what is posted live: numbered entries that every store catches up with.

An entry gets its number in the transaction that writes it, one more than the entry before. The log
lies beside the stores, so what was acknowledged outlives each of them and every process.
"""

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Literal

from ranking.online.attributes import Version
from ranking.online.database import Database, Txn, environment
from ranking.online.feed import Event

TABLES = ("meta", "entries", "ids")
IDENTITY, LAST = b"identity", b"last"
TRIMMED_AT_ONCE = 10_000  # entries of a transaction
Kind = Literal["event", "user", "item"]


@dataclass(frozen=True)
class WalEntry:
    """An event, or a version of a user or an item; when it was received (µs)."""

    kind: Kind
    received_ts: int
    content: Event | Version

    @property
    def ts(self) -> int:
        """The time (µs) by which the tables settle it: of an event its own."""
        return self.content.event_ts if isinstance(self.content, Event) else self.received_ts

    def encoded(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decoded(cls, stored: bytes) -> "WalEntry":
        """What `encoded` gave."""
        fields: Mapping[str, Any] = json.loads(stored)
        content = Event if fields["kind"] == "event" else Version
        return cls(fields["kind"], fields["received_ts"], content(**fields["content"]))


@dataclass(frozen=True)
class WriteAheadLog(Database):
    """The log of a lake; its identity tells it from another one that was begun in its place."""

    identity: bytes

    def append(
        self, batches: Sequence[Sequence[WalEntry]], is_stored: Callable[[Event], bool]
    ) -> list[int]:
        """Write entries in one transaction; returns how many of each batch were new.

        An event is new unless the log has its id, or `is_stored` says that the tables have it.
        """
        with self.writing() as txn:
            return [sum(_append(txn, one, is_stored) for one in batch) for batch in batches]

    def last(self) -> int:
        """The number of the newest entry; 0 before the first."""
        with self.reading() as txn:
            return _last(txn)

    def after(self, number: int) -> Iterator[tuple[int, WalEntry]]:
        """All entries behind one, with their numbers, in order."""
        with self.reading() as txn:
            for key, value in txn.from_key("entries", _key(number + 1)):
                yield int.from_bytes(key, "big"), WalEntry.decoded(value)

    def trim(self, settled_ts: int) -> None:
        """Remove the oldest entries, up to the first that is not older than a time (µs)."""
        while self._trim_some(settled_ts):
            pass

    def _trim_some(self, settled_ts: int) -> int:
        with self.writing() as txn:
            stored = ((key, WalEntry.decoded(value)) for key, value in txn.from_key("entries", b""))
            settled = takewhile(lambda pair: pair[1].ts < settled_ts, stored)
            found = list(islice(settled, TRIMMED_AT_ONCE))
            for key, entry in found:
                txn.delete("entries", key)
                if isinstance(entry.content, Event):
                    txn.delete("ids", id_of(entry.content))
        return len(found)


def open_log(folder: Path) -> WriteAheadLog:
    """The log of a folder; an empty one where there is none."""
    env, tables = environment(folder, TABLES, metasync=True)
    with Database(env, tables).writing() as txn:
        identity = txn.get("meta", IDENTITY)
        if not identity:
            identity = uuid.uuid4().bytes
            txn.put("meta", IDENTITY, identity)
    return WriteAheadLog(env, tables, identity)


def id_of(event: Event) -> bytes:
    """The key by which an event is known."""
    return id_key(event.type, event.event_id)


def id_key(type_: str, event_id: str) -> bytes:
    """The key by which an event of a type is known: ids of other logs, and types, may be equal."""
    return blake2b(f"{type_}\x1f{event_id}".encode(), digest_size=8).digest()


def _append(txn: Txn, entry: WalEntry, is_stored: Callable[[Event], bool]) -> bool:
    number = _key(_last(txn) + 1)
    if isinstance(entry.content, Event):
        key = id_of(entry.content)
        if txn.get("ids", key) or is_stored(entry.content):
            return False
        txn.put("ids", key, number)
    txn.put("entries", number, entry.encoded())
    txn.put("meta", LAST, number)
    return True


def _last(txn: Txn) -> int:
    return int.from_bytes(txn.get("meta", LAST), "big")


def _key(number: int) -> bytes:
    return number.to_bytes(8, "big")
