"""Whether the live feature store is newer than one that would be built, and need not be replaced.

A daily run builds the store of its day hours after that day, when a refresh of the next day may
already have built a later one.
"""

from dataclasses import dataclass
from pathlib import Path

import lmdb

from etl.errors import UserError
from etl.event_time import format_utc
from etl.tables.lake import Lake
from etl.tables.uri import local_cache_path
from ranking.feature_store.materialize import HistoryLengths, promoted_manifests, required_lengths
from ranking.feature_store.store import StoreMetadata, open_store
from ranking.feature_store.wal import feature_store_pointer


@dataclass(frozen=True)
class NewerStore:
    """The folder of a store, and the second until which it has data."""

    folder: Path
    data_until: int

    def __str__(self) -> str:
        """Why no store was built, in one line."""
        until = format_utc(self.data_until)
        return (
            f"{self.folder.name} is kept, because its data until {until} UTC are later; leave out "
            "--keep-newer to replace it"
        )


def newer_live_store(lake: Lake, data_until: int) -> NewerStore | None:
    """The live store, if it has data after an epoch second and need not be replaced.

    It must be of the same spec and hold what the promoted rankers read, and the tables must still
    have its last day. None if there is no such store, or it cannot be opened.

    Raises:
        UserError: No promoted ranker can be read, or the rankers read different sequences.
    """
    live = feature_store_pointer(lake.root).live_folder
    if live is None:
        return None
    folder = local_cache_path(live)
    try:
        store = open_store(folder, lake.spec)
    except (UserError, lmdb.Error):  # it is replaced
        return None
    store.close()
    metadata = store.metadata
    if metadata.data_until <= data_until or metadata.spec != lake.spec:
        return None
    last_day = lake.spec.last_day_before(metadata.data_until)
    latest_day = Lake(lake.root, lake.spec).latest_day("events")  # pins may be of an earlier day
    if latest_day is None or latest_day < last_day:
        return None
    if not _holds(metadata, required_lengths(promoted_manifests(lake))):
        return None
    return NewerStore(folder, metadata.data_until)


def _holds(metadata: StoreMetadata, lengths: HistoryLengths) -> bool:
    """Whether a store holds histories of some lengths, with teacher embeddings that are read."""
    compressor = metadata.compressor_version
    return (
        metadata.sequence == lengths.sequence
        and metadata.history_length >= lengths.events
        and (metadata.teacher_history_length or 0) >= lengths.teacher_embeddings
        and (not compressor or not lengths.compressors or compressor in lengths.compressors)
    )
