"""One version of the online feature store: its metadata, its tables, and how to open it."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from etl.errors import UserError
from etl.spec.base import StrictModel
from etl.spec.model import DataSpec
from etl.spec.units import DAY, MICROS
from etl.tables.schemas import RESERVED_ITEM_INDICES
from ranking.feature_store.counter_rows import COUNTER_LEVELS
from ranking.feature_store.counters import Counters
from ranking.feature_store.histories import HistoryRetention
from ranking.feature_store.storage import (
    DAMAGE_ERRORS,
    Database,
    RecordLayout,
    Txn,
    open_environment,
)

STORE_TABLES = (
    "meta", "users", "items", "item_versions", "bids", "history", "recent_history",
    "teacher_history", "event_ids",
    *(level.table for level in COUNTER_LEVELS),
)  # fmt: skip
METADATA_KEY = b"metadata"
RECORD_FORMAT = 4  # of all tables; counts up when one changes
LATENESS_MARGIN_DAYS = 2  # added to allowed_lateness: other time zones, clocks that run ahead
MAX_REQUEST_AGE = 3600  # seconds by which a request may be older than the latest features


class StoreMetadata(StrictModel):
    """What a store was built from: a spec, a sequence, and all data until `data_until` (seconds).

    `num_items` is the number of item indices in the tables at that time. Items that are seen first
    in the store may get another index in the tables later. `teacher_history_length` is None for
    stores that were written before it was recorded. `compressor_version` is that of the teacher
    embeddings; None if there are none, or in stores that were written before it was recorded.
    `record_format` is 1 for stores that were written before it was recorded.
    """

    spec: DataSpec
    sequence: str
    history_length: int
    teacher_history_length: int | None = None
    compressor_version: str | None = None
    data_until: int = 0
    num_items: int = RESERVED_ITEM_INDICES
    record_format: int = 1


@dataclass(frozen=True)
class FeatureStore(Database):
    """An open feature store."""

    metadata: StoreMetadata
    layout: RecordLayout
    counters: Counters
    histories: HistoryRetention

    @property
    def spec(self) -> DataSpec:
        """The spec that the store was built with."""
        return self.metadata.spec

    @property
    def data_until(self) -> int:
        """The second up to which data is included from the tables."""
        return self.metadata.data_until

    @property
    def earliest_request(self) -> int:
        """The earliest second for which features are available: a day before `data_until`."""
        return self.data_until - DAY

    @property
    def final_before_ts(self) -> int:
        """The time (µs) before which the tables are final: no event older than it can still land.

        The store keeps the ids of events since then, so that none is counted twice.
        """
        days = self.spec.allowed_lateness_days + LATENESS_MARGIN_DAYS
        return (self.data_until - days * DAY) * MICROS["s"]

    def last_applied_entry(self, txn: Txn, wal_id: bytes) -> int:
        """The number of the last entry of a write-ahead log that was applied to this store."""
        return int.from_bytes(txn.get("meta", b"applied " + wal_id), "big")

    def set_last_applied_entry(self, txn: Txn, wal_id: bytes, entry_number: int) -> None:
        """Record the last applied entry, in the same transaction as its effects."""
        txn.put("meta", b"applied " + wal_id, entry_number.to_bytes(8, "big"))


def create_store(folder: Path, metadata: StoreMetadata) -> FeatureStore:
    """Create an empty store in a new folder."""
    env, tables = open_environment(folder, STORE_TABLES, metasync=False)
    with Database(env, tables).write_transaction() as txn:
        stored = metadata.model_copy(update={"record_format": RECORD_FORMAT})
        txn.put("meta", METADATA_KEY, stored.model_dump_json().encode())
    env.close()
    return open_store(folder, metadata.spec)


def open_store(folder: Path, spec: DataSpec) -> FeatureStore:
    """Open the store of a folder.

    Raises:
        UserError: There is no store, it is damaged, or it was built with another spec.
    """
    database = _open_database(folder)
    env = database.env
    try:
        metadata = read_metadata(database)
        validate_metadata(metadata, spec, folder)
    except UserError:
        env.close()
        raise
    built_with = metadata.spec
    events = built_with.sequences[metadata.sequence].events or ()
    event_codes = tuple(built_with.event_codes[name] for name in events)
    return FeatureStore(
        env=env,
        tables=database.tables,
        metadata=metadata,
        layout=RecordLayout.from_spec(built_with),
        counters=Counters.from_spec(built_with),
        histories=HistoryRetention(event_codes, metadata.history_length),
    )


def read_data_until(folder: Path) -> int:
    """The second until which the store in a folder has data, with whichever spec it was built.

    Raises UserError if there is no store, it is damaged, or another version of Gemline wrote it.
    """
    database = _open_database(folder)
    try:
        return read_metadata(database).data_until
    finally:
        database.close()


def _open_database(folder: Path) -> Database:
    if not (folder / "data.mdb").is_file():
        raise UserError(f"{folder} holds no feature store; run `gemline rank materialize` first")
    try:
        return Database(*open_environment(folder, STORE_TABLES, metasync=False))
    except DAMAGE_ERRORS:
        raise UserError(
            f"the feature store in {folder} is damaged: run `gemline rank materialize` again"
        ) from None


def read_metadata(store: Database) -> StoreMetadata:
    """The metadata of a store; raises UserError if another version of Gemline wrote it."""
    with store.read_transaction() as txn:
        stored = txn.get("meta", METADATA_KEY)
    try:
        return StoreMetadata.model_validate_json(stored)
    except ValidationError:
        raise _other_version(store.folder) from None


def _other_version(folder: Path) -> UserError:
    return UserError(
        f"the feature store in {folder} was written by another version of Gemline: run "
        "`gemline rank materialize` again"
    )


def validate_metadata(metadata: StoreMetadata, spec: DataSpec, folder: Path) -> None:
    """Raise UserError if the store of a folder was built with another spec or record format."""
    if metadata.record_format != RECORD_FORMAT:
        raise _other_version(folder)
    if metadata.spec.hash != spec.hash:
        raise UserError(
            f"the feature store in {folder} was built with spec {metadata.spec.hash}, not "
            f"{spec.hash}: run `gemline rank materialize` again"
        )
