"""The embedded database (LMDB) of the feature store, and the layout of its values.

LMDB serves many reading processes and one writer at a time on one machine, and survives a kill at
any moment. Values are packed NumPy record arrays whose fields are named as the columns of the
tables.
"""

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

import lmdb
import numpy as np

from etl.errors import TemporaryError
from etl.spec.model import DataSpec
from etl.spec.units import MICROS
from etl.tables import atomic_io
from etl.tables.declared_columns import item_counter_key_columns
from features.schema import TEACHER_EMBEDDING_WIDTH, FeatureGroup, FeatureSchema, feature_schema

MAP_SIZE_BYTES = 1 << 38  # upper bound of a database; its file grows as it is filled
MAX_READERS = 512
DATA_FILE, USAGE_LOCK_FILE = "data.mdb", "usage.lock"  # the first as LMDB names it
STORAGE_ERRORS = (lmdb.Error, OSError, MemoryError)  # a retry may succeed
DAMAGE_ERRORS = (lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError)
Tables = Mapping[str, Any]
KeyValuePairs = list[tuple[bytes, bytes]]


class StorageFullError(TemporaryError):
    """The database or its disk is full; the message says what to do."""


@dataclass(frozen=True)
class Txn:
    """An LMDB transaction on the named tables of a database."""

    transaction: lmdb.Transaction
    tables: Tables

    def get(self, table: str, key: bytes) -> bytes:
        """The value of a key; empty if there is none."""
        return bytes(self.transaction.get(key, b"", db=self.tables[table]))

    def get_many(self, table: str, keys: Sequence[bytes]) -> list[bytes]:
        """The values of keys, in their order; empty if there is none."""
        with self.transaction.cursor(self.tables[table]) as cursor:
            found = dict(cursor.getmulti(keys))
        return [bytes(found.get(key, b"")) for key in keys]

    def iterate_from(self, table: str, key: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield keys and values in key order, starting at the first key not below the given one."""
        with self.transaction.cursor(self.tables[table]) as cursor:
            if cursor.set_range(key):
                yield from ((bytes(k), bytes(v)) for k, v in cursor.iternext())

    def put(self, table: str, key: bytes, value: bytes) -> None:
        """Write a value."""
        self.transaction.put(key, value, db=self.tables[table])

    def put_many(self, table: str, items: KeyValuePairs) -> None:
        """Write several values."""
        with self.transaction.cursor(self.tables[table]) as cursor:
            cursor.putmulti(items)

    def clear(self, table: str) -> None:
        """Remove all keys of a table."""
        self.transaction.drop(self.tables[table], delete=False)

    def delete(self, table: str, key: bytes) -> None:
        """Remove a key, if it exists."""
        self.transaction.delete(key, db=self.tables[table])


@dataclass(frozen=True)
class Database:
    """An open LMDB environment. A process can open a folder only once at a time."""

    env: lmdb.Environment
    tables: Tables

    @property
    def folder(self) -> Path:
        """The folder that holds the database."""
        return Path(self.env.path())

    @contextmanager
    def read_transaction(self) -> Iterator[Txn]:
        """Read from a snapshot taken when the block is entered."""
        with self.env.begin() as transaction:
            yield Txn(transaction, self.tables)

    @contextmanager
    def write_transaction(self) -> Iterator[Txn]:
        """Write in a transaction that is committed at the end of the block, or rolled back.

        Raises:
            StorageFullError: The database or its disk is full.
        """
        try:
            with self.env.begin(write=True) as transaction:
                yield Txn(transaction, self.tables)
        except lmdb.MapFullError:
            size = self.env.info()["map_size"]
            raise StorageFullError(
                f"{self.folder} holds {size:,} bytes and is full: run `gemline rank materialize`, "
                "which builds a new store and trims the write-ahead log"
            ) from None
        except lmdb.DiskError:
            raise StorageFullError(f"the disk of {self.folder} is full: free some space") from None

    def clear_stale_readers(self) -> None:
        """Release the reader slots of killed processes, so that LMDB can reuse their pages."""
        self.env.reader_check()

    def close(self) -> None:
        """Close the files."""
        self.env.close()


def open_environment(
    folder: Path, table_names: Sequence[str], *, metasync: bool
) -> tuple[lmdb.Environment, Tables]:
    """Open the environment of a folder, created if missing, and its tables.

    Without `metasync` a power loss can undo the last commits, but never corrupts the database.
    """
    folder.mkdir(parents=True, exist_ok=True)
    env = lmdb.open(
        str(folder), max_dbs=len(table_names), map_size=MAP_SIZE_BYTES, metasync=metasync,
        max_readers=MAX_READERS,
    )  # fmt: skip
    env.reader_check()
    return env, {name: env.open_db(name.encode()) for name in table_names}


def compact_environment(folder: Path, table_names: Sequence[str]) -> bool:
    """Rewrite an environment without its free pages, in which LMDB keeps bytes of removed values.

    Returns False, and changes nothing, while another holds the environment's usage lock: it would
    go on writing to the file that was replaced.
    """
    try:
        usage_lock = lock_usage(folder, exclusive=True)
    except BlockingIOError:
        return False
    with usage_lock:
        env, _ = open_environment(folder, table_names, metasync=True)
        data = folder / DATA_FILE
        with closing(env), atomic_io.replace_file(data) as copy, copy.open("wb") as file:
            env.copyfd(file.fileno(), compact=True)
            owner = data.stat()  # erasures may run as root, and services as another user
            os.fchmod(file.fileno(), owner.st_mode)
            os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
    return True


def lock_usage(folder: Path, *, exclusive: bool) -> IO[bytes]:
    """Lock an environment until the returned file is closed: exclusively to replace its file.

    A shared lock waits for an exclusive one. LMDB's own lock file cannot be used: a process that
    waits for it would take over the transaction numbers of the replaced file.

    Raises:
        BlockingIOError: An exclusive lock is requested while the environment is in use.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as on_error:
        path = folder / USAGE_LOCK_FILE
        file = on_error.enter_context(open(path, "rb", opener=_open_or_create))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB if exclusive else fcntl.LOCK_SH)
        on_error.pop_all()
    return file


def _open_or_create(path: str, flags: int) -> int:
    """Open a file to read it, which also those may who did not create it."""
    return os.open(path, flags | os.O_CREAT, 0o644)


KNOWN_EVENT = b"1"
MAX_KEY_BYTES = 500  # LMDB allows 511
UNKNOWN = -1  # an item index, a counter key or a second that is not known

HISTORY_DTYPE = np.dtype(
    [("visible_ts", "<i8"), ("event_ts", "<i8"), ("event", "S40"), ("item", "<i4"),
     ("surface", "<i1"), ("type", "<i1"), ("dwell", "<u1")]
)  # fmt: skip
TEACHER_HISTORY_DTYPE = np.dtype(
    [
        ("visible_ts", "<i8"),
        ("impression_ts", "<i8"),
        ("item", "<i4"),
        ("teacher_embedding_int4", "u1", (TEACHER_EMBEDDING_WIDTH // 2,)),
    ]
)
# A bid on an item. `goal` counts from 1 (0: none); `advertiser` is a hash, or NO_ADVERTISER.
BID_DTYPE = np.dtype(
    [
        ("valid_from", "<i8"),
        ("bid", "<f8"),
        ("goal", "<i2"),
        ("target_roas", "<f8"),
        ("advertiser", "<i8"),
    ]
)


def storage_key(name: str) -> bytes:
    """The key of a user or an item: its id, or a hash of an id that is too long for LMDB."""
    key = name.encode()
    return key if len(key) <= MAX_KEY_BYTES else b"\xff" + blake2b(key, digest_size=32).digest()


def storage_keys(names: Sequence[str]) -> np.ndarray:
    """The storage keys of users or items, as objects: NumPy's bytes lack zeros at the end."""
    return np.array([storage_key(name) for name in names], np.object_)


def group_rows(owner_keys: np.ndarray, rows: np.ndarray) -> Iterator[tuple[bytes, np.ndarray]]:
    """Each owner's key and rows; rows of one owner must be adjacent."""
    if not len(rows):
        return
    starts = np.flatnonzero(np.concatenate(([True], owner_keys[1:] != owner_keys[:-1])))
    for start, stop in zip(starts, np.append(starts[1:], len(rows)), strict=True):
        yield bytes(owner_keys[start]), rows[start:stop]


@dataclass(frozen=True)
class RecordLayout:
    """Record dtypes that depend on the spec."""

    spec: DataSpec
    features: FeatureSchema
    user: np.dtype
    item: np.dtype
    item_record: np.dtype

    @classmethod
    def from_spec(cls, spec: DataSpec) -> "RecordLayout":
        """The layout of the attributes and counter keys that a spec declares."""
        features = feature_schema(spec)
        num_keys = len(item_counter_key_columns(spec))
        return cls(
            spec=spec,
            features=features,
            user=version_dtype(features.user),
            item=version_dtype(features.item),
            item_record=np.dtype(
                [("index", "<i4"), ("known_since", "<i8"), ("keys", "<i8", (num_keys,))]
            ),
        )


def version_dtype(group: FeatureGroup) -> np.dtype:
    """The dtype of one version of an entity's attributes; `valid_from` is in µs."""
    return np.dtype(
        [
            ("valid_from", "<i8"),
            ("ids", "<i8", (len(group.categorical),)),
            ("numbers", "<f4", (len(group.numeric),)),
            ("content_vectors", "<f4", (sum(group.vectors.values()),)),
        ]
    )


def latest_versions(
    stored_versions: Sequence[bytes], version_dtype: np.dtype, as_of: int
) -> np.ndarray:
    """The latest version of each record (n) that is valid strictly before a second.

    A version of zeros and missing numbers if there is none.
    """
    sizes = np.array([len(value) for value in stored_versions], np.int64) // version_dtype.itemsize
    missing = np.zeros(1, version_dtype)
    if "numbers" in (version_dtype.names or ()):
        missing["numbers"] = np.nan
    rows = np.concatenate((np.frombuffer(b"".join(stored_versions), version_dtype), missing))
    owner = np.repeat(np.arange(len(stored_versions)), sizes)
    is_valid = rows["valid_from"][:-1] < as_of * MICROS["s"]
    num_valid = np.bincount(owner, is_valid, minlength=len(stored_versions)).astype(np.int64)
    first_row = np.cumsum(sizes) - sizes
    last_valid = np.where(num_valid > 0, first_row + num_valid - 1, len(rows) - 1)
    return np.asarray(rows[last_valid])
