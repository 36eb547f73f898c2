"""Point-in-time counters: aggregations of the events before each impression, by key.

The aggregation itself is NumPy on sorted arrays (features/counters/aggregations.py); Spark brings
the rows that share the prefix (first part) of a key together. Where it is hot, such as a large
surface, its events are first summed by second and type, and its impressions of one second are one
query, so that the rows of a key are bounded by the seconds of the longest window. What is counted
distinctly is reduced to the registers of tiles of time.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from etl.array_types import Bools, Float64, Int32, Int64
from etl.spec.counters import CounterSpec
from etl.spec.model import DataSpec
from features.counters.aggregations import Aggregations, EventRows, count_all_before
from features.counters.distinct_counts import MISSING_ENTRY
from features.counters.key_prefixes import (
    PREFIX,
    KeyPrefixes,
    distinct_entry,
    entry_field,
    in_fixed_point,
    number_field,
    prefixes_to_keys,
)
from features.counters.numeric_columns import MISSING, Numbers
from features.ragged import regroup_batches, run_starts

SEEN = "seen"
MAX_BYTES = 2**30  # of an array of binary values, whose offsets are 32-bit numbers
SEEN_KEY = -1  # the number under which `seen` is counted
# The values of a key are the bytes of its numbers: Spark copies a list number by number.
COUNTED_SCHEMA = "impression_id string, key int, values binary"
BY_SECOND_SCHEMA = "key int, key_hash bigint, ts bigint, values binary"


def count_events(
    spec: DataSpec, events: DataFrame, queries: DataFrame, hot_prefixes: DataFrame | None = None
) -> DataFrame:
    """`impression_id`, all counters of the spec, and `seen`: all `events` of the user before it.

    `events` have visible_ts, type, the columns that `aggregations` need, and a bigint column for
    each part of a key (`key_user`, ...); `queries` have impression_id, as_of_ts and the same key
    columns. What is counted distinctly has such a column in `events`, too; of items, it is
    `item_hash`. `hot_prefixes` are those of `find_hot_prefixes`.
    """
    prefixes, aggregations = KeyPrefixes.from_spec(spec), Aggregations.from_spec(spec)
    numbers = [
        in_fixed_point(spec, name).alias(number_field(name)) for name in aggregations.input_columns
    ]
    entries = [
        distinct_entry(part).alias(entry_field(part)) for part in aggregations.distinct_columns
    ]
    ts = F.col("visible_ts").alias("ts")
    event_rows = prefixes.explode(events, ts, "type", *numbers, *entries)
    query_rows = prefixes.explode(queries, F.col("as_of_ts").alias("ts"), "impression_id")
    of_hot = []
    if hot_prefixes is not None:
        hot = F.broadcast(hot_prefixes)
        hot_rows = (rows.join(hot, [*PREFIX], "left_semi") for rows in (event_rows, query_rows))
        of_hot.append(count_by_second(spec, prefixes, *hot_rows))
        event_rows, query_rows = (
            rows.join(hot, [*PREFIX], "left_anti") for rows in (event_rows, query_rows)
        )
    counted = count_by_impression(spec, prefixes, event_rows, query_rows)
    counted = functools.reduce(DataFrame.unionByName, [counted, *of_hot])
    builder = _RowBuilder(spec.counters, aggregations.missing)
    rows = counted.repartition("impression_id").sortWithinPartitions("impression_id")
    return rows.mapInArrow(builder.build_partition, builder.sql_schema)


def count_by_impression(
    spec: DataSpec, prefixes: KeyPrefixes, events: DataFrame, queries: DataFrame
) -> DataFrame:
    """`impression_id`, `key` and the `values` of each impression and each key that it has.

    The number of all events of its user has the key SEEN_KEY.
    """
    rows = _sort_by_group(queries.unionByName(events, allowMissingColumns=True), *PREFIX)
    counting = _ImpressionCounting(prefixes, Aggregations.from_spec(spec))
    return rows.mapInArrow(counting.count_partition, COUNTED_SCHEMA)


def count_by_second(
    spec: DataSpec, prefixes: KeyPrefixes, events: DataFrame, queries: DataFrame
) -> DataFrame:
    """The rows of `count_by_impression`, from events that are summed by second first."""
    aggregations = Aggregations.from_spec(spec)
    events = events.filter(F.col("type").isin(sorted(aggregations.all_types)))
    key = ("key", "key_hash", "ts")
    numbers = [
        F.struct(
            F.count(name).alias("count"),
            F.coalesce(F.sum(name), F.lit(0)).alias("total"),
            F.min(name).alias("smallest"),
            F.max(name).alias("largest"),
        ).alias(name)
        for name in map(number_field, aggregations.input_columns)
    ]
    by_key = prefixes_to_keys(prefixes, events)
    by_second = by_key.groupBy(*key, "type").agg(F.count("*").alias("count"), *numbers)
    for part in aggregations.distinct_columns:
        types = [each.event_type for each in aggregations.distinct if each.column == part]
        of_types = by_key.filter(F.col("type").isin(types))
        entries = first_and_last_in_tiles(of_types, entry_field(part), min(spec.counters.windows))
        entries = entries.withColumn("count", F.lit(0).cast("bigint"))
        by_second = by_second.unionByName(entries, allowMissingColumns=True)
    requested = prefixes_to_keys(prefixes, queries)
    rows = requested.select(*key).distinct().unionByName(by_second, allowMissingColumns=True)
    rows = _sort_by_group(rows, "key", "key_hash")
    counted = rows.mapInArrow(_SecondCounting(aggregations).count_partition, BY_SECOND_SCHEMA)
    return requested.join(counted, [*key]).select("impression_id", "key", "values")


def first_and_last_in_tiles(rows: DataFrame, entry: str, seconds: int) -> DataFrame:
    """The first and the last second of each entry of each key and type in each tile of time.

    They have the entries of all rows in any window of `seconds` or more, which begins in one tile,
    where it has an entry if it has its last second, and ends in another one, where it has an entry
    if it has its first. A tile has at most two of each entry, however many rows it has.

    Returns:
        Different rows with `key`, `key_hash`, `ts`, `type` and the column `entry`.
    """
    tile = F.col("ts") - F.pmod("ts", F.lit(seconds))
    tiles = rows.filter(F.col(entry) != MISSING_ENTRY).groupBy(
        "key", "key_hash", tile.alias("tile"), "type", entry
    )
    edges = tiles.agg(F.array_distinct(F.array(F.min("ts"), F.max("ts"))).alias("edges"))
    return edges.select("key", "key_hash", F.explode("edges").alias("ts"), "type", entry)


def _sort_by_group(rows: DataFrame, *columns: str) -> DataFrame:
    """Rows partitioned and sorted by the hash of some columns, `group`.

    Spark sorts by one number several times as fast as by two columns. A collision puts two groups
    side by side; nothing relies on a group having one value only.
    """
    rows = rows.withColumn("group", F.xxhash64(*columns))
    return rows.repartition("group").sortWithinPartitions("group")


@dataclass(frozen=True)
class _ImpressionCounting:
    """Counting of a partition's rows of events (without impression_id) and queries (with one)."""

    prefixes: KeyPrefixes
    aggregations: Aggregations

    def count_partition(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The values of each query of a partition that is sorted by `group`."""
        for table in regroup_batches(batches, "group"):
            parts = table["prefix_part"].to_numpy()
            for prefix_part in np.unique(parts).tolist():
                rows = table.filter(pa.array(parts == prefix_part)).combine_chunks()
                yield from self._count_prefix_part(rows, prefix_part)

    def _count_prefix_part(self, table: pa.Table, prefix_part: int) -> Iterator[pa.RecordBatch]:
        """The values of the keys with one prefix."""
        is_query = table["impression_id"].is_valid().to_numpy()
        ts = table["ts"].to_numpy()
        ids = table["impression_id"].combine_chunks()
        if prefix_part == self.prefixes.user_part:
            user = table["prefix"].to_numpy()
            seen = count_all_before(user[~is_query], ts[~is_query], user[is_query], ts[is_query])
            yield from _counted_batches(ids.drop_null(), SEEN_KEY, seen[:, None].astype(np.float64))
        for name, number in zip(
            self.prefixes.hash_columns, self.prefixes.key_numbers(prefix_part), strict=False
        ):
            has_key, key = table[name].is_valid().to_numpy(), table[name].fill_null(0).to_numpy()
            is_counted = is_query & has_key
            events = self._event_rows(table, key, ~is_query & has_key)
            values = self.aggregations.values(events, key[is_counted], ts[is_counted])
            yield from _counted_batches(ids.filter(pa.array(is_counted)), number, values)

    def _event_rows(self, table: pa.Table, key: Int64, rows: Bools) -> EventRows:
        types = table["type"].to_numpy()[rows].astype(np.int64)
        numbers = {
            name: table[number_field(name)].fill_null(MISSING).to_numpy()[rows]
            for name in self.aggregations.input_columns
        }
        entries = {part: column[rows] for part, column in _entries(table, self.aggregations)}
        return EventRows.of_events(key[rows], table["ts"].to_numpy()[rows], types, numbers, entries)


@dataclass(frozen=True)
class _SecondCounting:
    """Counting of a partition's rows of events (with a count) and queries (without one)."""

    aggregations: Aggregations

    def count_partition(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The values of each query of a partition that is sorted by `group`."""
        for table in regroup_batches(batches, "group"):
            key = table["key"].to_numpy()
            for number in np.unique(key).tolist():
                of_key = table.filter(pa.array(key == number)).combine_chunks()
                yield from self._count_key(of_key).to_batches()

    def _count_key(self, table: pa.Table) -> pa.Table:
        """The queries of a table of one key, with their values."""
        is_query = table["count"].is_null().to_numpy()
        key, ts = table["key_hash"].to_numpy(), table["ts"].to_numpy()
        of_events = table.filter(pa.array(~is_query)).combine_chunks()
        type_, count = (of_events[name].to_numpy().astype(np.int64) for name in ("type", "count"))
        numbers = {
            name: _numbers_of_column(of_events[number_field(name)].combine_chunks())
            for name in self.aggregations.input_columns
        }
        entries = dict(_entries(of_events, self.aggregations))
        events = EventRows(key[~is_query], ts[~is_query], type_, count, numbers, entries)
        values = self.aggregations.values(events, key[is_query], ts[is_query])
        queries = table.select(["key", "key_hash", "ts"]).filter(pa.array(is_query))
        return queries.append_column("values", pa.chunked_array(_pack_numbers(values), pa.binary()))


@dataclass(frozen=True)
class _RowBuilder:
    """Brings the values of all keys of an impression into one row of counters and `seen`."""

    counters: CounterSpec
    missing: Float64  # the values of a key that an impression does not have; NaN is null

    @property
    def sql_schema(self) -> str:
        """The columns that are returned, as Spark declares them."""
        counters = [f"{counter.column} {counter.sql_type}" for counter in self.counters.columns]
        return ", ".join(("impression_id string", f"{SEEN} int", *counters))

    def build_partition(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """One row per impression of a partition that is sorted by impression."""
        for table in regroup_batches(batches, "impression_id"):
            yield self._build_rows(table.combine_chunks())

    def _build_rows(self, table: pa.Table) -> pa.RecordBatch:
        ids, key = table["impression_id"].combine_chunks(), table["key"].to_numpy()
        starts = run_starts(ids)
        row = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(ids))))
        columns = {"impression_id": ids.take(pa.array(starts))}
        columns[SEEN] = pa.array(self._rows_of_key(table, key, row, SEEN_KEY)[:, 0], pa.int32())
        for number, parts in enumerate(self.counters.keys):
            values = self._rows_of_key(table, key, row, number)
            for counter, column in zip(self.counters.columns_of(parts), values.T, strict=True):
                columns[counter.column] = _number_array(column, counter.sql_type)
        return pa.record_batch(columns)

    def _rows_of_key(self, table: pa.Table, key: Int32, row: Int64, number: int) -> Float64:
        """The values of a key for all impressions (Q, columns)."""
        missing = np.zeros(1) if number == SEEN_KEY else self.missing
        is_of_key = key == number
        packed = table["values"].filter(pa.array(is_of_key)).combine_chunks()
        rows = np.tile(missing, (row[-1] + 1, 1))
        rows[row[is_of_key]] = _unpack_numbers(packed, len(missing))
        return rows


def _entries(table: pa.Table, aggregations: Aggregations) -> Iterator[tuple[str, Int64]]:
    """What is counted distinctly, each with the entries of the rows of a table (N)."""
    for part in aggregations.distinct_columns:
        yield part, table[entry_field(part)].fill_null(MISSING_ENTRY).to_numpy()


def _numbers_of_column(column: pa.StructArray) -> Numbers:
    """The numbers of a column of structs with the fields of Numbers."""
    return Numbers(
        *(pc.struct_field(column, field.name).fill_null(0).to_numpy() for field in fields(Numbers))
    )


def _number_array(values: Float64, sql_type: str) -> pa.Array:
    """A column of numbers, in which NaN is null."""
    if sql_type == "float":
        return pa.array(values.astype(np.float32), from_pandas=True)
    return pa.array(values, pa.int32(), from_pandas=True)


def _counted_batches(
    impression_ids: pa.Array, key: int, values: Float64
) -> Iterator[pa.RecordBatch]:
    """Values (Q, columns) of impressions (Q) and a key, as rows of COUNTED_SCHEMA."""
    first = 0
    for packed in _pack_numbers(values):
        keys = pa.array(np.full(len(packed), key, np.int32))
        ids = impression_ids.slice(first, len(packed))
        yield pa.record_batch([ids, keys, packed], names=["impression_id", "key", "values"])
        first += len(packed)


def _pack_numbers(rows: Float64) -> Iterator[pa.Array]:
    """Rows of numbers (N, columns) as one binary value each, in arrays of at most MAX_BYTES."""
    row_bytes = rows.shape[1] * rows.itemsize
    step = max(1, MAX_BYTES // max(1, row_bytes))
    for piece in np.split(rows, range(step, len(rows), step)):
        offsets = np.arange(len(piece) + 1, dtype=np.int32) * np.int32(row_bytes)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(piece))]
        yield pa.Array.from_buffers(pa.binary(), len(piece), buffers)


def _unpack_numbers(packed: pa.Array, num_columns: int) -> Float64:
    """The rows of `_pack_numbers`, of an array that is no slice of another."""
    data = packed.buffers()[2]
    numbers = np.frombuffer(data, np.float64) if data else np.zeros(0)
    return numbers[: len(packed) * num_columns].reshape(-1, num_columns)
