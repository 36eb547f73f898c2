"""The embedded store (LMDB): many readers, one writer at a time, on one machine, safe to kill."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb

from etl.errors import UserError
from etl.spec.base import Strict
from etl.spec.model import DataSpec
from etl.tables.contracts import RESERVED_ITEMS
from ranking.online.counters import Counters, Records
from ranking.online.history import Histories
from ranking.online.layout import Layout

NAMES = ("meta", "users", "items", "versions", "offers", "history", "totals", "hours", "before",
         "seen", "log")  # fmt: skip
MOST_BYTES = 1 << 38  # of the file, which grows as it is filled
META = b"store"


class Meta(Strict):
    """What a store is of: histories of `length` events of a sequence, all that landed by a second.

    `items` is the number of items that had an index then: those that come later may have another
    one in the tables.
    """

    spec: DataSpec
    sequence: str
    length: int
    landed: int = 0
    items: int = RESERVED_ITEMS


@dataclass(frozen=True)
class Txn:
    """A transaction: the named tables of the store at one moment."""

    transaction: lmdb.Transaction
    tables: Mapping[str, Any]

    def get(self, table: str, key: bytes) -> bytes:
        """A value; nothing where there is none."""
        return bytes(self.transaction.get(key, b"", db=self.tables[table]))

    def many(self, table: str, keys: list[bytes]) -> list[bytes]:
        """Several values, in the order of their keys."""
        with self.transaction.cursor(self.tables[table]) as cursor:
            there = dict(cursor.getmulti(keys))
        return [bytes(there.get(key, b"")) for key in keys]

    def from_key(self, table: str, key: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Keys and values from a key on, in order."""
        with self.transaction.cursor(self.tables[table]) as cursor:
            if cursor.set_range(key):
                yield from ((bytes(k), bytes(v)) for k, v in cursor.iternext())

    def put(self, table: str, key: bytes, value: bytes) -> None:
        """Replace a value."""
        self.transaction.put(key, value, db=self.tables[table])

    def put_all(self, table: str, items: list[tuple[bytes, bytes]]) -> None:
        """Replace many values."""
        with self.transaction.cursor(self.tables[table]) as cursor:
            cursor.putmulti(items)

    @property
    def counted(self) -> Records:
        """The records of counters."""
        return Records(self.transaction, self.tables["totals"], self.tables["hours"])


@dataclass(frozen=True)
class Store:
    """Features of users and items of a spec, and how each is laid out."""

    meta: Meta
    env: lmdb.Environment
    tables: Mapping[str, Any]
    layout: Layout
    counters: Counters
    histories: Histories

    @property
    def spec(self) -> DataSpec:
        """The spec that it was built for."""
        return self.meta.spec

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return Path(self.env.path())

    @property
    def landed(self) -> int:
        """The second by which all that it was made from had landed."""
        return self.meta.landed

    @contextmanager
    def reading(self) -> Iterator[Txn]:
        """What was there when the block began."""
        with self.env.begin() as transaction:
            yield Txn(transaction, self.tables)

    @contextmanager
    def writing(self) -> Iterator[Txn]:
        """All that the block writes, or nothing where it raises."""
        with self.env.begin(write=True) as transaction:
            yield Txn(transaction, self.tables)

    def close(self) -> None:
        """Let go of the file."""
        self.env.close()


def create(folder: Path, meta: Meta) -> Store:
    """An empty store in a new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    env = _environment(folder, create=True)
    with env.begin(write=True) as transaction:
        told = meta.model_dump_json().encode()
        transaction.put(META, told, db=env.open_db(b"meta", transaction))
    env.close()
    return open_store(folder, meta.spec)


def open_store(folder: Path, spec: DataSpec) -> Store:
    """The store of a folder; raises UserError where there is none, or one of another spec."""
    if not (folder / "data.mdb").is_file():
        raise UserError(f"{folder} holds no online features; run `gemline rank store` first")
    env = _environment(folder, create=False)
    with env.begin() as transaction:
        told = transaction.get(META, b"", db=env.open_db(b"meta", transaction))
    meta = Meta.model_validate_json(told)
    if meta.spec.hash != spec.hash:
        env.close()
        raise UserError(
            f"{folder} holds features of spec {meta.spec.hash}, not of {spec.hash}: run "
            "`gemline rank store` again"
        )
    tables = {name: env.open_db(name.encode()) for name in NAMES}
    layout = Layout.of(meta.spec)
    events = meta.spec.sequences[meta.sequence].events or ()
    codes = tuple(meta.spec.event_codes[name] for name in events)
    histories = Histories(codes, meta.length)
    return Store(meta, env, tables, layout, Counters.of(meta.spec, layout.totals), histories)


def _environment(folder: Path, create: bool) -> lmdb.Environment:
    return lmdb.open(
        str(folder), max_dbs=len(NAMES), map_size=MOST_BYTES, create=create, metasync=False,
        max_readers=512,
    )  # fmt: skip
