"""The embedded database (LMDB): many readers, one writer, on one machine, safe to kill."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb

from etl.errors import TemporaryError

MAP_BYTES = 1 << 38  # most that a database may hold; its file grows as it is filled
MAX_READERS = 512
Tables = Mapping[str, Any]


class StorageFullError(TemporaryError):
    """There is no room to write: the sentence says what to do."""


@dataclass(frozen=True)
class Txn:
    """A transaction: the named tables of a database at one moment."""

    transaction: lmdb.Transaction
    tables: Tables

    def get(self, table: str, key: bytes) -> bytes:
        """A value; empty where there is none."""
        return bytes(self.transaction.get(key, b"", db=self.tables[table]))

    def many(self, table: str, keys: Sequence[bytes]) -> list[bytes]:
        """Several values, in the order of their keys."""
        with self.transaction.cursor(self.tables[table]) as cursor:
            found = dict(cursor.getmulti(keys))
        return [bytes(found.get(key, b"")) for key in keys]

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

    def delete(self, table: str, key: bytes) -> None:
        """Remove a value, if there is one."""
        self.transaction.delete(key, db=self.tables[table])


@dataclass(frozen=True)
class Database:
    """An open LMDB environment. A process may open a folder once only."""

    env: lmdb.Environment
    tables: Tables

    @property
    def folder(self) -> Path:
        """The folder of its files."""
        return Path(self.env.path())

    @contextmanager
    def reading(self) -> Iterator[Txn]:
        """A snapshot of the moment at which the block began."""
        with self.env.begin() as transaction:
            yield Txn(transaction, self.tables)

    @contextmanager
    def writing(self) -> Iterator[Txn]:
        """A transaction: it is committed at the end of the block, or not at all if that raises.

        Raises StorageFullError where there is no room.
        """
        try:
            with self.env.begin(write=True) as transaction:
                yield Txn(transaction, self.tables)
        except lmdb.MapFullError:
            size = self.env.info()["map_size"]
            raise StorageFullError(
                f"{self.folder} holds {size:,} bytes and is full: run `gemline rank store`, which "
                "starts a new store and removes from the log what is final in the tables"
            ) from None
        except lmdb.DiskError:
            raise StorageFullError(f"the disk of {self.folder} is full: free some space") from None

    def clear_stale_readers(self) -> None:
        """Free the slots of processes that were killed while they read: pages are reused again."""
        self.env.reader_check()

    def close(self) -> None:
        """Close the files."""
        self.env.close()


def environment(
    folder: Path, names: Sequence[str], *, metasync: bool
) -> tuple[lmdb.Environment, Tables]:
    """The environment of a folder, which is made if it is missing, and its tables.

    Without `metasync` a loss of power may undo the last commits, but damages nothing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    env = lmdb.open(
        str(folder), max_dbs=len(names), map_size=MAP_BYTES, metasync=metasync,
        max_readers=MAX_READERS,
    )  # fmt: skip
    env.reader_check()
    return env, {name: env.open_db(name.encode()) for name in names}
