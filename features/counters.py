"""Point-in-time counters: aggregations of the events before each impression, by key.

The aggregation itself is NumPy on sorted arrays (features/aggregations.py); Spark brings the rows
that share the first part of a key together. Where that part is hot, such as a large surface, its
events are first summed by second and type, and its impressions of one second are one query, so that
the rows of a key are bounded by the seconds of the longest window.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from etl.array_types import Bools, Float64, Int32, Int64
from etl.spec.counters import CounterKey, CounterSpec, InputColumn
from etl.spec.model import DataSpec
from features.aggregations import Aggregations, EventRows, count_all_before
from features.numeric_columns import FIXED_POINT, MISSING, Numbers
from features.ragged import regroup_batches, run_starts

SEEN = "seen"
SEEN_KEY = -1  # the number under which `seen` is counted
HOT_EVENTS = 1_000_000  # from so many events on, a first part of a key is hot
LEAD = ("lead_part", "lead")  # number and value of the first part of a key
# The values of a key are the bytes of its numbers: Spark copies a list number by number.
COUNTED_SCHEMA = "impression_id string, key int, values binary"
BY_SECOND_SCHEMA = "key int, key_hash bigint, ts bigint, values binary"


def count_events(
    spec: DataSpec, events: DataFrame, queries: DataFrame, hot_leads: DataFrame | None = None
) -> DataFrame:
    """`impression_id`, all counters of the spec, and `seen`: all `events` of the user before it.

    `events` have visible_ts, type, the columns that `aggregations` need, and a bigint column for
    each part of a key (`key_user`, ...); `queries` have impression_id, as_of_ts and the same key
    columns. `hot_leads` are those of `find_hot_leads`.
    """
    leads, aggregations = KeyLeads.from_spec(spec), Aggregations.from_spec(spec)
    numbers = [_in_fixed_point(name).alias(name) for name in aggregations.input_columns]
    event_rows = leads.explode(events, F.col("visible_ts").alias("ts"), "type", *numbers)
    query_rows = leads.explode(queries, F.col("as_of_ts").alias("ts"), "impression_id")
    of_hot = []
    if hot_leads is not None:
        hot = F.broadcast(hot_leads)
        hot_rows = (rows.join(hot, [*LEAD], "left_semi") for rows in (event_rows, query_rows))
        of_hot.append(count_by_second(spec, leads, *hot_rows))
        event_rows, query_rows = (
            rows.join(hot, [*LEAD], "left_anti") for rows in (event_rows, query_rows)
        )
    counted = count_by_impression(spec, leads, event_rows, query_rows)
    counted = functools.reduce(DataFrame.unionByName, [counted, *of_hot])
    builder = _RowBuilder(spec.counters, aggregations.missing)
    rows = counted.repartition("impression_id").sortWithinPartitions("impression_id")
    return rows.mapInArrow(builder.build_partition, builder.sql_schema)


def find_hot_leads(spec: DataSpec, events: DataFrame, min_events: int = HOT_EVENTS) -> DataFrame:
    """The first parts of keys, other than users, with at least so many events; few rows."""
    leads = KeyLeads.from_spec(spec)
    rows = leads.explode(events, "type").filter(F.col("lead_part") != leads.user)
    return rows.groupBy(*LEAD).count().filter(F.col("count") >= min_events).select(*LEAD)


@dataclass(frozen=True)
class KeyLeads:
    """The keys of a spec by their first part, such as the user; `keys` have numbers from 0 on."""

    keys: tuple[CounterKey, ...]
    parts: tuple[str, ...]

    @classmethod
    def from_spec(cls, spec: DataSpec) -> "KeyLeads":
        """The keys that a spec declares."""
        keys = spec.counters.keys
        return cls(keys, tuple(dict.fromkeys(("user", *(key[0] for key in keys)))))

    @property
    def user(self) -> int:
        """The number of the part `user`, which is always there."""
        return self.parts.index("user")

    def key_numbers(self, lead_part: int) -> list[int]:
        """The numbers of the keys that begin with a part."""
        return [n for n, key in enumerate(self.keys) if key[0] == self.parts[lead_part]]

    @property
    def hash_columns(self) -> list[str]:
        """Columns with the hashes of the keys of one first part: `key_hash_0`, …."""
        most_keys = max(len(self.key_numbers(number)) for number in range(len(self.parts)))
        return [f"key_hash_{position}" for position in range(most_keys)]

    def explode(self, rows: DataFrame, *columns: Column | str) -> DataFrame:
        """A row for each row and each first part that it has.

        `lead_part`, `lead`, the hashes of its keys (null where a part is missing) and the columns.
        """
        of_parts = []
        for lead_part, part in enumerate(self.parts):
            hashes = [_hash_key(self.keys[number]) for number in self.key_numbers(lead_part)]
            padding = [F.lit(None)] * (len(self.hash_columns) - len(hashes))
            named = zip(self.hash_columns, (*hashes, *padding), strict=True)
            of_parts.append(
                F.struct(
                    F.lit(lead_part).alias("lead_part"),
                    F.col(f"key_{part}").alias("lead"),
                    *[value.cast("bigint").alias(name) for name, value in named],
                )
            )
        exploded = rows.select(*columns, F.inline(F.array(*of_parts)))
        return exploded.filter("lead IS NOT NULL")


def count_by_impression(
    spec: DataSpec, leads: KeyLeads, events: DataFrame, queries: DataFrame
) -> DataFrame:
    """`impression_id`, `key` and the `values` of each impression and each key that it has.

    The number of all events of its user has the key SEEN_KEY.
    """
    rows = _sort_by_group(queries.unionByName(events, allowMissingColumns=True), *LEAD)
    counting = _ImpressionCounting(leads, Aggregations.from_spec(spec))
    return rows.mapInArrow(counting.count_partition, COUNTED_SCHEMA)


def count_by_second(
    spec: DataSpec, leads: KeyLeads, events: DataFrame, queries: DataFrame
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
        for name in aggregations.input_columns
    ]
    by_key = leads_to_keys(leads, events).groupBy(*key, "type")
    by_second = by_key.agg(F.count("*").alias("count"), *numbers)
    requested = leads_to_keys(leads, queries)
    rows = requested.select(*key).distinct().unionByName(by_second, allowMissingColumns=True)
    rows = _sort_by_group(rows, "key", "key_hash")
    counted = rows.mapInArrow(_SecondCounting(aggregations).count_partition, BY_SECOND_SCHEMA)
    return requested.join(counted, [*key]).select("impression_id", "key", "values")


def leads_to_keys(leads: KeyLeads, rows: DataFrame) -> DataFrame:
    """A row for each key of each row of `KeyLeads.explode`: `key`, `key_hash`, other columns."""
    pairs = [
        F.struct(
            F.when(F.col("lead_part") == lead_part, F.lit(number)).alias("key"),
            F.col(name).alias("key_hash"),
        )
        for lead_part in range(len(leads.parts))
        for name, number in zip(leads.hash_columns, leads.key_numbers(lead_part), strict=False)
    ]
    others = [name for name in rows.columns if name not in (*LEAD, *leads.hash_columns)]
    keys = rows.select(*others, F.inline(F.array(*pairs)))
    return keys.filter("key IS NOT NULL AND key_hash IS NOT NULL")


def _in_fixed_point(name: InputColumn) -> Column:
    """A column of `events` as integers, as `FixedPoint.round` has them; null where missing."""
    fixed_point = FIXED_POINT[name]
    stored, limit = F.col(fixed_point.stored_column), F.lit(fixed_point.limit)
    limited = F.greatest(F.least(stored, limit), -limit)
    # `least` and `greatest` skip nulls, and would make a missing number the limit.
    return F.when(stored.isNotNull(), F.rint(limited * fixed_point.scale).cast("bigint"))


def _sort_by_group(rows: DataFrame, *columns: str) -> DataFrame:
    """Rows partitioned and sorted by the hash of some columns, `group`.

    Spark sorts by one number several times as fast as by two columns. A collision puts two groups
    side by side; nothing relies on a group having one value only.
    """
    rows = rows.withColumn("group", F.xxhash64(*columns))
    return rows.repartition("group").sortWithinPartitions("group")


def _hash_key(key: CounterKey) -> Column:
    """One integer for a combination of key parts; null where one of them is missing."""
    columns = [F.col(f"key_{part}") for part in key]
    is_complete = functools.reduce(Column.__and__, [column.isNotNull() for column in columns])
    return F.when(is_complete, columns[0] if len(columns) == 1 else F.xxhash64(*columns))


@dataclass(frozen=True)
class _ImpressionCounting:
    """Counting of a partition's rows of events (without impression_id) and queries (with one)."""

    leads: KeyLeads
    aggregations: Aggregations

    def count_partition(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The values of each query of a partition that is sorted by `group`."""
        for table in regroup_batches(batches, "group"):
            parts = table["lead_part"].to_numpy()
            for lead_part in np.unique(parts).tolist():
                rows = table.filter(pa.array(parts == lead_part)).combine_chunks()
                yield from self._count_lead_part(rows, lead_part)

    def _count_lead_part(self, table: pa.Table, lead_part: int) -> Iterator[pa.RecordBatch]:
        """The values of the keys that begin with one part."""
        is_query = table["impression_id"].is_valid().to_numpy()
        ts = table["ts"].to_numpy()
        ids = table["impression_id"].combine_chunks()
        if lead_part == self.leads.user:
            lead = table["lead"].to_numpy()
            seen = count_all_before(lead[~is_query], ts[~is_query], lead[is_query], ts[is_query])
            yield _counted_batch(ids.drop_null(), SEEN_KEY, seen[:, None].astype(np.float64))
        for name, number in zip(
            self.leads.hash_columns, self.leads.key_numbers(lead_part), strict=False
        ):
            has_key, key = table[name].is_valid().to_numpy(), table[name].fill_null(0).to_numpy()
            is_counted = is_query & has_key
            events = self._event_rows(table, key, ~is_query & has_key)
            values = self.aggregations.values(events, key[is_counted], ts[is_counted])
            yield _counted_batch(ids.filter(pa.array(is_counted)), number, values)

    def _event_rows(self, table: pa.Table, key: Int64, rows: Bools) -> EventRows:
        types = table["type"].to_numpy()[rows].astype(np.int64)
        numbers = {
            name: table[name].fill_null(MISSING).to_numpy()[rows]
            for name in self.aggregations.input_columns
        }
        return EventRows.of_events(key[rows], table["ts"].to_numpy()[rows], types, numbers)


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
            name: _numbers_of_column(of_events[name].combine_chunks())
            for name in self.aggregations.input_columns
        }
        events = EventRows(key[~is_query], ts[~is_query], type_, count, numbers)
        values = self.aggregations.values(events, key[is_query], ts[is_query])
        queries = table.select(["key", "key_hash", "ts"]).filter(pa.array(is_query))
        return queries.append_column("values", _pack_numbers(values))


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


def _counted_batch(impression_ids: pa.Array, key: int, values: Float64) -> pa.RecordBatch:
    """Values (Q, columns) of impressions (Q) and a key, as rows of COUNTED_SCHEMA."""
    keys = pa.array(np.full(len(values), key, np.int32))
    names = ["impression_id", "key", "values"]
    return pa.record_batch([impression_ids, keys, _pack_numbers(values)], names=names)


def _pack_numbers(rows: Float64) -> pa.Array:
    """Rows of numbers (N, columns) as one binary value each."""
    offsets = np.arange(len(rows) + 1, dtype=np.int32) * (rows.shape[1] * rows.itemsize)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(rows))]
    return pa.Array.from_buffers(pa.binary(), len(rows), buffers)


def _unpack_numbers(packed: pa.Array, num_columns: int) -> Float64:
    """The rows of `_pack_numbers`, of an array that is no slice of another."""
    data = packed.buffers()[2]
    numbers = np.frombuffer(data, np.float64) if data else np.zeros(0)
    return numbers[: len(packed) * num_columns].reshape(-1, num_columns)
