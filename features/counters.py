"""Point-in-time counters: one pass of events and impressions for each leading key."""

import functools
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from etl.spec.model import DataSpec
from etl.tables.contracts import counter_columns
from features.counting import counts_before, seen_before
from features.groups import whole_groups

Key = tuple[str, ...]


def count(spec: DataSpec, events: DataFrame, queries: DataFrame) -> DataFrame:
    """`impression_id`, all counters of the spec, and `seen`: the user's events given before it.

    `events` have visible_ts, type and a bigint column for each single key (`k_user`, …);
    `queries` have impression_id, as_of_ts and the same key columns.
    """
    names = dict(zip(spec.counters.keys, _columns_by_key(spec), strict=True))
    keys: tuple[Key, ...] = (*spec.counters.keys, ("user",))
    leads = list(dict.fromkeys(key[0] for key in keys))
    passes = [
        _pass(spec, events, queries, lead, {k: c for k, c in names.items() if k[0] == lead})
        for lead in leads
    ]
    return functools.reduce(lambda a, b: a.join(b, "impression_id"), passes)


def _columns_by_key(spec: DataSpec) -> list[list[str]]:
    columns = counter_columns(spec)
    each = len(columns) // max(1, len(spec.counters.keys))
    return [columns[i : i + each] for i in range(0, len(columns), each)]


def _pass(
    spec: DataSpec, events: DataFrame, queries: DataFrame, lead: str, names: dict[Key, list[str]]
) -> DataFrame:
    """Counters of all keys that begin with `lead`: their events lie together, sorted by it."""
    keys = list(names)
    hashed = [_hash(key).alias(f"key_{i}") for i, key in enumerate(keys)]
    lead_key = F.coalesce(f"k_{lead}", F.lit(0)).alias("lead")
    no_id = F.lit(None).cast("string").alias("impression_id")
    happened = events.filter(F.col(f"k_{lead}").isNotNull())
    happened = happened.select(lead_key, "visible_ts", "type", no_id, *hashed)
    asked = queries.select(
        lead_key,
        F.col("as_of_ts").alias("visible_ts"),
        F.lit(0).cast("tinyint").alias("type"),
        "impression_id",
        *hashed,
    )
    rows = happened.unionByName(asked).repartition("lead").sortWithinPartitions("lead")
    columns = [name for key in keys for name in names[key]]
    schema = ["impression_id string", *[f"{name} int" for name in columns]]
    schema += ["seen int"] if lead == "user" else []
    windows = spec.counters.windows
    types = tuple(spec.event_codes[event] for event in spec.counters.events)

    def count_partition(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for table in whole_groups(batches, "lead"):
            arrays = _count_table(table, len(keys), windows, types)
            arrays += [_count_seen(table)] if lead == "user" else []
            yield pa.record_batch(arrays, names=[field.split()[0] for field in schema])

    return rows.mapInArrow(count_partition, ", ".join(schema))


def _hash(key: Key) -> Column:
    """One integer for a combination of keys; null where one of them is missing."""
    columns = [F.col(f"k_{part}") for part in key]
    whole = functools.reduce(Column.__and__, [column.isNotNull() for column in columns])
    return F.when(whole, columns[0] if len(columns) == 1 else F.xxhash64(*columns))


def _count_table(
    table: pa.Table, keys: int, windows: tuple[int, ...], types: tuple[int, ...]
) -> list[pa.Array]:
    """Arrays of impression ids and of the counts of each key in turn; a missing key counts 0."""
    asked = table["impression_id"].is_valid().to_numpy()
    ts = table["visible_ts"].to_numpy()
    type_ = table["type"].to_numpy().astype(np.int64)
    arrays = [table["impression_id"].filter(pa.array(asked)).combine_chunks()]
    for index in range(keys):
        column = table[f"key_{index}"]
        there = column.is_valid().to_numpy()
        key = column.fill_null(0).to_numpy()
        event = ~asked & there
        found = counts_before(
            key[event], ts[event], type_[event], key[asked], ts[asked], windows, types
        )
        arrays += [pa.array(counts) for counts in (found * there[asked, None]).T]
    return arrays


def _count_seen(table: pa.Table) -> pa.Array:
    """How many events of the lead key lie before each impression."""
    asked = table["impression_id"].is_valid().to_numpy()
    lead, ts = table["lead"].to_numpy(), table["visible_ts"].to_numpy()
    return pa.array(seen_before(lead[~asked], ts[~asked], lead[asked], ts[asked]))
