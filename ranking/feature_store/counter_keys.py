"""Values of counter keys, as they were known when an event became visible or a request was made.

The attributes of an item are those of its first version; those of a user are as of that second.
Those of the context are of the event or the request itself, and clocks show when it occurred.

N events, or the candidates of a request.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.array_types import Int64
from etl.spec.attributes import LocalTimeAttribute
from etl.spec.model import DataSpec
from etl.spec.units import MICROS
from etl.tables.declared_columns import item_counter_key_columns
from features.counters.distinct_counts import MISSING_ENTRY, entries_of
from features.encoding.scalar import (
    MISSING_CATEGORY,
    encode_categorical,
    encode_context_category,
    encode_local_time,
    spark_xxhash64,
)
from features.ragged import latest_before
from ranking.feature_store.encoded_attributes import (
    AttributeValues,
    EncodedAttributes,
    validated_string,
)
from ranking.feature_store.storage import (
    UNKNOWN,
    RecordLayout,
    Txn,
    latest_versions,
    storage_key,
)

KeyValues = dict[str, Int64]
CLOCK_SECONDS = 900  # offsets of time zones are multiples of it


def counter_key_values(
    layout: RecordLayout, txn: Txn, user: str, surface: str, items: np.ndarray, epoch_second: int
) -> KeyValues:
    """Values (N) of all counter keys: one user on one surface, with the records (N) of items."""
    count = len(items)
    values = {
        "user": np.full(count, spark_xxhash64(user)),
        "surface": np.full(count, layout.spec.surface_codes[surface]),
        **item_key_values(layout, items, epoch_second),
    }
    if layout.spec.user_counter_keys:
        stored = txn.get("users", storage_key(user))
        version = latest_versions([stored], layout.user, epoch_second)
        values |= {name: np.full(count, value) for name, value in _user_key_values(layout, version)}
    return values


def item_key_values(
    layout: RecordLayout, items: np.ndarray, epoch_seconds: Int64 | int
) -> KeyValues:
    """Values (N) of the counter keys that belong to items, as they were known at a second (N)."""
    known_since = items["known_since"]
    is_known = (known_since != UNKNOWN) & (known_since < epoch_seconds)
    values = {"item": items["index"].astype(np.int64)}
    for column, name in enumerate(item_counter_key_columns(layout.spec)):
        key = np.where(is_known, items["keys"][:, column], UNKNOWN)
        values[name.removeprefix("key_")] = key
    return values


def _user_key_values(layout: RecordLayout, version: np.ndarray) -> Iterator[tuple[str, int]]:
    """The value of each counter key that belongs to a user, in a version (1) of the user."""
    columns = list(layout.features.user.categorical)
    for name in layout.spec.user_counter_keys:
        category = int(version["ids"][0, columns.index(f"user_{name}")])
        yield name, UNKNOWN if category == MISSING_CATEGORY else category


def user_key_values_of_events(
    layout: RecordLayout, versions: pa.Table, users: pa.DictionaryArray, epoch_seconds: Int64
) -> KeyValues:
    """Values (N) of the counter keys that belong to the users of events.

    `versions` are rows of the table of users' attributes; of equal times, the latest day counts.
    """
    versions = versions.sort_by("day")
    owner = pc.index_in(versions["user_id"], users.dictionary)
    versions = versions.filter(owner.is_valid())
    latest = latest_before(
        owner.drop_null().to_numpy().astype(np.int64),
        versions["valid_from"].to_numpy(),
        users.indices.to_numpy().astype(np.int64),
        epoch_seconds * MICROS["s"],
    )
    values = {}
    for name, attribute in layout.spec.user_counter_keys.items():
        encode = partial(encode_categorical, attribute)
        rows = _known_categories(map_distinct(encode, versions[f"attr_{name}"]))
        values[name] = np.append(rows, UNKNOWN)[latest]
    return values


def context_key_values_of_request(layout: RecordLayout, context: EncodedAttributes) -> KeyValues:
    """Values (N) of the counter keys that belong to the context of candidates."""
    columns = list(layout.features.context.categorical)
    return {
        name: _known_categories(context.ids[:, columns.index(f"ctx_{name}")])
        for name in layout.spec.context_counter_keys
    }


def context_key_values_of_event(
    spec: DataSpec, context: AttributeValues, epoch_second: int
) -> KeyValues:
    """Values (1) of the counter keys that belong to the context of a posted event.

    Raises:
        UserError: A value is not a string.
    """
    values = {}
    for name, attribute in spec.context_counter_keys.items():
        raw = validated_string(f"{name} of the context", context.get(name))
        category = encode_context_category(attribute, raw, epoch_second, spec.time_zone)
        values[name] = _known_categories(np.array([category]))
    return values


def distinct_values_of_event(spec: DataSpec, attributes: AttributeValues) -> KeyValues:
    """Values (1) of a posted event's own attributes that are counted distinctly.

    Raises:
        UserError: A value is not a string.
    """
    values = {}
    for name in spec.distinct_event_attributes:
        raw = validated_string(f"{name} of the event", attributes.get(name))
        values[name] = np.array([hash_text(raw)])
    return values


def distinct_values_of_events(spec: DataSpec, events: pa.Table) -> KeyValues:
    """Values (N) of the attributes of events in a table that are counted distinctly."""
    names = spec.distinct_event_attributes
    return {name: map_distinct(hash_text, events[f"event_{name}"]) for name in names}


def hash_text(text: str | None) -> int:
    """Spark's hash of a text; UNKNOWN where missing."""
    return UNKNOWN if text is None else spark_xxhash64(text)


def map_distinct(function: Callable[[str | None], int], column: pa.ChunkedArray) -> Int64:
    """A function of the texts of a column (N), called once for each distinct text."""
    texts = column.combine_chunks().dictionary_encode(null_encoding="encode")
    values = np.array([function(text) for text in texts.dictionary.to_pylist()], np.int64)
    return np.asarray(values[texts.indices.to_numpy()])


def context_key_values_of_events(spec: DataSpec, events: pa.Table) -> KeyValues:
    """Values (N) of the counter keys that belong to the contexts of events in a table."""
    values = {}
    for name, attribute in spec.context_counter_keys.items():
        if isinstance(attribute, LocalTimeAttribute):
            seconds = events["event_ts"].to_numpy() // MICROS["s"]
            starts, position = np.unique(seconds // CLOCK_SECONDS, return_inverse=True)
            of_starts = [
                encode_local_time(attribute, start * CLOCK_SECONDS, spec.time_zone)
                for start in starts.tolist()
            ]
            categories = np.array(of_starts, np.int64)[position]
        else:
            categories = map_distinct(partial(encode_categorical, attribute), events[f"ctx_{name}"])
        values[name] = _known_categories(categories)
    return values


def distinct_entries(columns: Iterable[str], key_values: KeyValues) -> KeyValues:
    """Entries (N) of the parts of keys of which distinct values are counted.

    Those of items are of `item_hash`: the index of an item may be another in another store.
    """
    entries = {}
    for name in columns:
        values = key_values["item_hash" if name == "item" else name]
        entries[name] = np.where(values == UNKNOWN, MISSING_ENTRY, entries_of(values))
    return entries


def _known_categories(categories: Int64) -> Int64:
    return np.where(categories == MISSING_CATEGORY, UNKNOWN, categories)
