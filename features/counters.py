"""Point-in-time counters: aggregations of the events before each impression, by key.

The aggregation itself is NumPy on sorted arrays (features/aggregations.py); Spark brings the rows
of a key together. Keys that begin with the user are counted per impression: a user has a bounded
number of events a day. Any other key, such as a surface or an advertiser, may have a large share of
all events. Its events are first added up by second and type, and its impressions of one second
are one query, so that the rows of a key are bounded by the seconds of the longest window.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from etl.spec.counters import CounterKey
from etl.spec.model import DataSpec
from features.aggregations import (
    MAX_DWELL_MS,
    Aggregations,
    EventRows,
    count_all_before,
    round_dwell_ms,
)
from features.ragged import regroup_batches, run_starts

SEEN = "seen"
USER_KEY = "key_user"
VALUES_SCHEMA = "key int, key_hash bigint, ts bigint, values array<double>"
Bools = npt.NDArray[np.bool_]
Float64 = npt.NDArray[np.float64]


def count_events(spec: DataSpec, events: DataFrame, queries: DataFrame) -> DataFrame:
    """`impression_id`, all counters of the spec, and `seen`: all `events` of the user before it.

    `events` have visible_ts, type, dwell_ms if the spec has `mean_dwell`, and a bigint column for
    each part of a key (`key_user`, ...); `queries` have impression_id, as_of_ts and the same key
    columns.
    """
    user_keys = [key for key in spec.counters.keys if key[0] == "user"]
    shared_keys = [key for key in spec.counters.keys if key[0] != "user"]
    counted = count_by_user(spec, user_keys, events, queries)
    if shared_keys:
        shared = count_by_shared_key(spec, shared_keys, events, queries)
        counted = counted.join(shared, "impression_id", "left")
    columns = [
        column
        for keys, prefix in ((user_keys, "user"), (shared_keys, "shared"))
        for number, key in enumerate(keys)
        for column in _counter_columns(spec, key, F.col(f"{prefix}_{number}"))
    ]
    return counted.select("impression_id", SEEN, *columns)


def _counter_columns(spec: DataSpec, key: CounterKey, values: Column) -> Iterator[Column]:
    """The counters of a key from the array of their values, which is null if the key is missing."""
    missing = Aggregations.from_spec(spec).missing
    for position, counter in enumerate(spec.counters.columns_of(key)):
        value = values[position]
        if not np.isnan(missing[position]):
            value = F.coalesce(value, F.lit(float(missing[position])))
        yield value.cast(counter.sql_type).alias(counter.column)


def count_by_user(
    spec: DataSpec, keys: Sequence[CounterKey], events: DataFrame, queries: DataFrame
) -> DataFrame:
    """`impression_id`, `seen`, and the values of each key that begins with the user.

    Values are arrays in the columns `user_0`, `user_1`, …, which are null where the key is missing.
    """
    hashes = [_hash_key(key).alias(f"key_hash_{number}") for number, key in enumerate(keys)]
    dwell = ["dwell_ms"] if spec.counters.mean_dwell else []
    event_rows = events.select(USER_KEY, F.col("visible_ts").alias("ts"), "type", *dwell, *hashes)
    query_rows = queries.select(USER_KEY, F.col("as_of_ts").alias("ts"), "impression_id", *hashes)
    rows = query_rows.unionByName(event_rows, allowMissingColumns=True)
    rows = rows.repartition(USER_KEY).sortWithinPartitions(USER_KEY)
    counting = _UserCounting(len(keys), Aggregations.from_spec(spec))
    return rows.mapInArrow(counting.count_partition, counting.sql_schema)


def count_by_shared_key(
    spec: DataSpec, keys: Sequence[CounterKey], events: DataFrame, queries: DataFrame
) -> DataFrame:
    """`impression_id`, and the values of each key that does not begin with the user.

    Values are arrays in the columns `shared_0`, `shared_1`, …, which are null where the key is
    missing. An impression without any of the keys is absent.
    """
    aggregations = Aggregations.from_spec(spec)
    events = events.filter(F.col("type").isin(sorted(aggregations.all_types)))
    key = ("key", "key_hash", "ts")
    by_second = _explode_keys(keys, events, F.col("visible_ts").alias("ts"), "type", *_dwell(spec))
    by_second = by_second.groupBy(*key, "type").agg(
        F.count("*").alias("count"),
        F.count("dwell_ms").alias("dwell_count"),
        F.coalesce(F.sum("dwell_ms"), F.lit(0)).alias("dwell_ms"),
    )
    requested = _explode_keys(keys, queries, F.col("as_of_ts").alias("ts"), "impression_id")
    rows = requested.select(*key).distinct().unionByName(by_second, allowMissingColumns=True)
    rows = rows.repartition("key", "key_hash").sortWithinPartitions("key", "key_hash")
    counted = rows.mapInArrow(_SharedKeyCounting(aggregations).count_partition, VALUES_SCHEMA)
    of_keys = [
        F.first(F.when(F.col("key") == number, F.col("values")), ignorenulls=True)
        for number in range(len(keys))
    ]
    columns = [values.alias(f"shared_{number}") for number, values in enumerate(of_keys)]
    return requested.join(counted, [*key]).groupBy("impression_id").agg(*columns)


def _explode_keys(keys: Sequence[CounterKey], rows: DataFrame, *columns: Column | str) -> DataFrame:
    """A row for each row and each key that it has: `key` (its number), `key_hash`, the columns."""
    hashes = [
        F.struct(F.lit(number).alias("key"), _hash_key(key).alias("key_hash"))
        for number, key in enumerate(keys)
    ]
    return rows.select(*columns, F.inline(F.array(*hashes))).filter("key_hash IS NOT NULL")


def _dwell(spec: DataSpec) -> list[Column]:
    """The dwell in whole milliseconds, as `round_dwell_ms` rounds it, or null."""
    if not spec.counters.mean_dwell:
        return [F.lit(None).cast("bigint").alias("dwell_ms")]
    return [F.rint(F.least("dwell_ms", F.lit(MAX_DWELL_MS))).cast("bigint").alias("dwell_ms")]


def _hash_key(key: CounterKey) -> Column:
    """One integer for a combination of key parts; null where one of them is missing."""
    columns = [F.col(f"key_{part}") for part in key]
    is_complete = functools.reduce(Column.__and__, [column.isNotNull() for column in columns])
    return F.when(is_complete, columns[0] if len(columns) == 1 else F.xxhash64(*columns))


@dataclass(frozen=True)
class _UserCounting:
    """Counting of a partition's rows of events (without impression_id) and queries (with one)."""

    num_keys: int
    aggregations: Aggregations

    @property
    def sql_schema(self) -> str:
        """The columns that are returned, as Spark declares them."""
        values = [f"user_{number} array<double>" for number in range(self.num_keys)]
        return ", ".join(("impression_id string", f"{SEEN} int", *values))

    def count_partition(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The values of each query of a partition that is sorted by user."""
        for table in regroup_batches(batches, USER_KEY):
            is_query = table["impression_id"].is_valid().to_numpy()
            user, ts = table[USER_KEY].to_numpy(), table["ts"].to_numpy()
            seen = count_all_before(user[~is_query], ts[~is_query], user[is_query], ts[is_query])
            columns = {
                "impression_id": table["impression_id"].drop_null().combine_chunks(),
                SEEN: pa.array(seen),
            }
            for number in range(self.num_keys):
                key = table[f"key_hash_{number}"]
                columns[f"user_{number}"] = self._count_key(table, is_query, key)
            yield pa.record_batch(columns)

    def _count_key(self, table: pa.Table, is_query: Bools, keys: pa.ChunkedArray) -> pa.Array:
        """The values of the queries; a query whose key is missing has none."""
        has_key, key = keys.is_valid().to_numpy(), keys.fill_null(0).to_numpy()
        is_event, is_counted = ~is_query & has_key, (is_query & has_key)
        ts = table["ts"].to_numpy()
        dwell_ms = None
        if self.aggregations.dwell_types:
            dwell_ms = round_dwell_ms(table["dwell_ms"].to_numpy()[is_event])
        types = table["type"].to_numpy()[is_event].astype(np.int64)
        events = EventRows.of_events(key[is_event], ts[is_event], types, dwell_ms)
        values = self.aggregations.values(events, key[is_counted], ts[is_counted])
        return _list_array(values, is_counted[is_query])


@dataclass(frozen=True)
class _SharedKeyCounting:
    """Counting of a partition's rows of events (with a count) and queries (without one)."""

    aggregations: Aggregations

    def count_partition(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The values of each query of a partition that is sorted by key."""
        for table in regroup_batches(batches, "key", "key_hash"):
            yield from self._count_table(table.combine_chunks()).to_batches()

    def _count_table(self, table: pa.Table) -> pa.Table:
        """The queries of a table, with their values."""
        is_query = table["count"].is_null().to_numpy()
        starts = [run_starts(table[name].combine_chunks()) for name in ("key", "key_hash")]
        is_start = np.zeros(len(table), np.int64)
        is_start[np.concatenate(starts)] = 1
        group, ts = np.cumsum(is_start), table["ts"].to_numpy()
        numbers = {
            name: table[name].filter(pa.array(~is_query)).to_numpy().astype(np.int64)
            for name in ("type", "count", "dwell_count", "dwell_ms")
        }
        events = EventRows(group[~is_query], ts[~is_query], **numbers)
        values = self.aggregations.values(events, group[is_query], ts[is_query])
        queries = table.select(["key", "key_hash", "ts"]).filter(pa.array(is_query))
        return queries.append_column("values", _list_array(values))


def _list_array(values: Float64, has_values: Bools | None = None) -> pa.Array:
    """Rows of numbers as lists, in which NaN is null; null where a row has no values."""
    rows = values
    if has_values is not None:
        rows = np.full((len(has_values), values.shape[1]), np.nan)
        rows[has_values] = values
    offsets = pa.array(np.arange(len(rows) + 1) * rows.shape[1], pa.int32())
    mask = None if has_values is None else pa.array(~has_values)
    numbers = pa.array(rows.ravel(), from_pandas=True)
    return pa.ListArray.from_arrays(offsets, numbers, mask=mask)
