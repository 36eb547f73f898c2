"""Builds a feature store from a lake's tables, with all data until a second.

`materialize` builds the next version of a lake's store, with what the promoted rankers read, and
points the lake at it. Running services then load it.
"""

import itertools
import logging
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import pyarrow.compute as pc
from tqdm import tqdm

from etl.errors import UserError
from etl.tables import arrow, atomic_io, model_schemas, schemas
from etl.tables.lake import Lake
from etl.tables.lease import hold_leases
from etl.tables.pointer import VersionPointer, remove_unreferenced_versions
from etl.tables.schemas import RESERVED_ITEM_INDICES
from etl.tables.uri import local_cache_path, resolve_uri
from ranking.feature_store.carried_histories import HistoryBuilder
from ranking.feature_store.store import (
    FeatureStore,
    StoreMetadata,
    create_store,
    open_store,
)
from ranking.feature_store.table_source import TableSource, rows_until
from ranking.feature_store.wal import feature_store_pointer
from ranking.registry.manifest import RankerManifest, read_package
from ranking.registry.ranker import live_pointer
from training.teacher.embeddings import latest_compressor

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HistoryLengths:
    """The amount of data that a store holds per user.

    `events` of the named sequence, and `teacher_embeddings` of earlier impressions, which are of
    the latest of `compressors`, or of all compressors if none is named.
    """

    sequence: str
    events: int
    teacher_embeddings: int = 0
    compressors: frozenset[str] = frozenset()


def build_feature_store(
    lake: Lake,
    folder: Path,
    data_until: int,
    lengths: HistoryLengths,
    earlier_stores: Sequence[Path] = (),
) -> FeatureStore:
    """Build a store in a new folder from all data until an epoch second, and open it.

    The folder appears only when the store is complete. The histories of the first of the earlier
    stores are reused whose histories are still those of the tables.
    """
    data_until_day = lake.spec.last_day_before(data_until)
    item_table = arrow.snapshot(lake, schemas.items(lake.spec))
    items = rows_until(item_table, data_until_day)
    metadata = StoreMetadata(
        spec=lake.spec,
        sequence=lengths.sequence,
        history_length=lengths.events,
        teacher_history_length=lengths.teacher_embeddings,
        compressor_version=_stored_compressor(lake, data_until_day, lengths),
        data_until=data_until,
        num_items=1 + pc.max(items["item_index"]).as_py() if len(items) else RESERVED_ITEM_INDICES,
    )
    staging = atomic_io.staging_folder(folder)
    store = create_store(staging, metadata)
    source = TableSource(lake, store, data_until_day, lengths.teacher_embeddings)
    source.write_items(items)
    source.write_attribute_versions("user")
    source.write_attribute_versions("item")
    HistoryBuilder(lake, store, source.events, item_table, data_until_day).build(earlier_stores)
    records = itertools.chain(
        source.teacher_history_records(), source.recent_counter_records(), source.event_id_records()
    )
    for table, pairs in tqdm(records, desc="feature store", unit="table", disable=None):
        with store.write_transaction() as txn:
            txn.put_many(table, pairs)
    store.close()
    atomic_io.publish_folder(staging, folder)
    return open_store(folder, lake.spec)


def _stored_compressor(lake: Lake, data_until_day: date, lengths: HistoryLengths) -> str | None:
    """The compressor of the teacher embeddings of a store; None if it holds none."""
    schema = model_schemas.user_teacher_embeddings(lake.spec)
    if not lengths.teacher_embeddings or not lake.exists(schema.name):
        return None
    columns = ["visible_ts", "compressor_version"]
    rows = rows_until(arrow.snapshot(lake, schema), data_until_day, columns)
    return latest_compressor(rows, lengths.compressors)


def materialize_lease(lake: str, command: str) -> AbstractContextManager[None]:
    """The lease for building this machine's feature store of a lake; each machine has its own."""
    return hold_leases(str(local_cache_path(resolve_uri(lake))), ["materialize"], command)


def materialize(lake: Lake, data_until: int) -> str:
    """Build the lake's next feature store, point the lake at it, and return its name.

    It has all data until an epoch second. The promoted rankers determine what it holds; those that
    cannot be read are skipped with a warning.

    Raises:
        UserError: No promoted ranker can be read, or the rankers read different sequences.
    """
    lengths = required_lengths(promoted_manifests(lake))
    pointer = feature_store_pointer(lake.root)
    name = next_store_name(pointer, lake.spec.last_day_before(data_until))
    folder = local_cache_path(pointer.folder) / name
    state = pointer.read()
    retained = state.retained if state else ()
    earlier = [local_cache_path(pointer.folder) / version for version in reversed(retained)]
    build_feature_store(lake, folder, data_until, lengths, earlier).close()
    pointer.promote(name)
    remove_unreferenced_versions(pointer.folder, pointer)
    return name


def next_store_name(pointer: VersionPointer, day: date) -> str:
    """DAY-NUMBER with a number above all existing ones of the day.

    A process that has opened a store recognizes a newer one by its name.
    """
    names = [path.name for path in pointer.folder.iterdir()] if pointer.folder.exists() else []
    found = [re.fullmatch(rf"{day:%Y%m%d}-([0-9]+)", name) for name in names]
    return f"{day:%Y%m%d}-{1 + max((int(match[1]) for match in found if match), default=0)}"


def required_lengths(manifests: Sequence[RankerManifest]) -> HistoryLengths:
    """What rankers read together; raises UserError if they read different sequences.

    They may read teacher embeddings of different compressors: a store holds those of the latest.
    """
    sequences = sorted({manifest.sequence for manifest in manifests})
    if len(sequences) > 1:
        raise UserError(
            f"the rankers read the sequences {', '.join(sequences)}; train them on one sequence"
        )
    return HistoryLengths(
        sequence=sequences[0],
        events=max(manifest.max_length for manifest in manifests),
        teacher_embeddings=max(manifest.teacher_history_length for manifest in manifests),
        compressors=frozenset(
            manifest.compressor_version for manifest in manifests if manifest.compressor_version
        ),
    )


def promoted_manifests(lake: Lake) -> list[RankerManifest]:
    """The manifests of the promoted rankers; those that cannot be read are skipped with a warning.

    Raises UserError if there is none.
    """
    manifests, errors = [], []
    for surface in lake.spec.ad_surfaces:
        try:
            folder = live_pointer(lake.root, surface).live_folder
            if folder:
                manifests.append(read_package(folder).manifest)
        except UserError as error:
            errors.append(str(error))
            log.warning("ranker skipped: %s", error)
    if not manifests:
        no_ranker = f"no ranker of {lake.root} is promoted; run `gemline rank promote` first"
        raise UserError("; ".join(errors) or no_ranker)
    return manifests
