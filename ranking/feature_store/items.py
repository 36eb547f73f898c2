"""Item records of the store: an item's index in the tables and its counter keys.

An item is registered when it is first seen, in an event or in a version of its attributes. Reading
(`read_item_records`) and writing (`register_items`, `update_first_version`) are separate functions.

N items.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from etl.spec.units import MICROS
from etl.tables.declared_columns import item_counter_key_columns
from etl.tables.schemas import RESERVED_ITEM_INDICES
from features.encoding.scalar import spark_xxhash64
from ranking.feature_store.storage import UNKNOWN, RecordLayout, Txn, storage_key

if TYPE_CHECKING:
    import pyarrow as pa

    from ranking.feature_store.store import FeatureStore

NEXT_ITEM_INDEX_KEY = b"next item"


def blank_item_records(layout: RecordLayout, count: int) -> np.ndarray:
    """Blank records (N) of items: all fields are UNKNOWN."""
    records = np.zeros(count, layout.item_record)
    for name in ("index", "known_since", "keys"):
        records[name] = UNKNOWN
    return records


def read_item_records(layout: RecordLayout, txn: Txn, item_ids: Sequence[str]) -> np.ndarray:
    """The records (N) of items; a blank record for an item that was never seen."""
    blank = blank_item_records(layout, 1).tobytes()
    stored = txn.get_many("items", [storage_key(item_id) for item_id in item_ids])
    return np.frombuffer(b"".join(value or blank for value in stored), layout.item_record)


def register_items(layout: RecordLayout, txn: Txn, item_ids: Iterable[str]) -> None:
    """Write a record with the next free index for each item that was never seen."""
    for item_id in item_ids:
        key = storage_key(item_id)
        if txn.get("items", key):
            continue
        next_index = int.from_bytes(txn.get("meta", NEXT_ITEM_INDEX_KEY), "big")
        index = max(next_index, RESERVED_ITEM_INDICES)
        record = blank_item_records(layout, 1)
        record["index"] = index
        txn.put("items", key, record.tobytes())
        txn.put("meta", NEXT_ITEM_INDEX_KEY, (index + 1).to_bytes(8, "big"))


def registered_item_records(store: "FeatureStore", item_ids: "pa.ChunkedArray") -> np.ndarray:
    """Register the items (N) that the store has never seen, and read the records of all (N)."""
    items = item_ids.combine_chunks().dictionary_encode()
    distinct = items.dictionary.to_pylist()
    with store.write_transaction() as txn:
        register_items(store.layout, txn, distinct)
        records = read_item_records(store.layout, txn, distinct)
    return np.asarray(records[items.indices.to_numpy()])


def update_first_version(
    layout: RecordLayout,
    txn: Txn,
    item_id: str,
    valid_from: int,
    attributes: Mapping[str, object],
    posted_at: int | None = None,
) -> None:
    """Set an item's counter keys from a version (µs) that is the earliest one so far.

    Counters are keyed by an item's first version, so that later changes leave the past as it was
    (see features/items.py). A version that is posted (`posted_at`, seconds) is valid not before its
    day began, as in the tables, and changes no keys that are already known.
    """
    record = read_item_records(layout, txn, [item_id]).copy()
    second, known = valid_from // MICROS["s"], int(record["known_since"][0])
    latest_change = second
    if posted_at is not None:
        second = max(second, layout.spec.day_start(layout.spec.day_of(posted_at)))
        latest_change = max(second, posted_at)
    if known != UNKNOWN and known <= latest_change:
        return
    record["known_since"] = second
    for column, name in enumerate(item_counter_key_columns(layout.spec)):
        value = attributes.get(name.removeprefix("key_"))
        record["keys"][0, column] = UNKNOWN if value is None else spark_xxhash64(str(value))
    txn.put("items", storage_key(item_id), record.tobytes())
