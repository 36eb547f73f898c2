"""Point-in-time counters: aggregations of the events before each impression, by key.

The aggregation itself is NumPy on sorted arrays (features/aggregations.py); Spark groups the rows
that share the first part of a key.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from etl.spec.counters import Counter, CounterKey
from etl.spec.model import DataSpec
from features.aggregations import Aggregations, KeyedEvents, count_all_before, round_dwell_ms
from features.ragged import regroup_batches

SEEN = "seen"
Bools = npt.NDArray[np.bool_]


def count_events(spec: DataSpec, events: DataFrame, queries: DataFrame) -> DataFrame:
    """`impression_id`, all counters of the spec, and `seen`: all `events` of the user before it.

    `events` have visible_ts, type, dwell_ms if the spec has `mean_dwell`, and a bigint column for
    each part of a key (`key_user`, ...); `queries` have impression_id, as_of_ts and the same key
    columns.
    """
    keys_by_lead_part: dict[str, list[CounterKey]] = {}
    for key in spec.counters.keys:
        keys_by_lead_part.setdefault(key[0], []).append(key)
    keys_by_lead_part.setdefault("user", [])
    counted = [
        _count_by_lead_part(spec, events, queries, lead_part, keys)
        for lead_part, keys in keys_by_lead_part.items()
    ]
    return functools.reduce(lambda a, b: a.join(b, "impression_id"), counted)


def _count_by_lead_part(
    spec: DataSpec,
    events: DataFrame,
    queries: DataFrame,
    lead_part: str,
    keys: list[CounterKey],
) -> DataFrame:
    """Counters of keys that begin with `lead_part`: rows are grouped by it."""
    key_hashes = [_hash_key(key).alias(f"key_hash_{i}") for i, key in enumerate(keys)]
    lead_key = F.coalesce(f"key_{lead_part}", F.lit(0)).alias("lead")
    dwell = ["dwell_ms"] if spec.counters.mean_dwell else []
    event_rows = events.filter(F.col(f"key_{lead_part}").isNotNull())
    event_rows = event_rows.select(lead_key, "visible_ts", "type", *dwell, *key_hashes)
    query_rows = queries.select(
        lead_key,
        F.col("as_of_ts").alias("visible_ts"),
        F.lit(0).cast("tinyint").alias("type"),
        "impression_id",
        *key_hashes,
    )
    rows = query_rows.unionByName(event_rows, allowMissingColumns=True)
    rows = rows.repartition("lead").sortWithinPartitions("lead")
    counting = _PartitionCounting(
        columns=tuple(spec.counters.columns_of(key) for key in keys),
        aggregations=Aggregations.from_spec(spec),
        counts_all=lead_part == "user",
    )
    return rows.mapInArrow(counting.count_partition, counting.sql_schema)


def _hash_key(key: CounterKey) -> Column:
    """One integer for a combination of key parts; null where one of them is missing."""
    columns = [F.col(f"key_{part}") for part in key]
    is_complete = functools.reduce(Column.__and__, [column.isNotNull() for column in columns])
    return F.when(is_complete, columns[0] if len(columns) == 1 else F.xxhash64(*columns))


@dataclass(frozen=True)
class _PartitionCounting:
    """Counting of a partition's rows of events (without impression_id) and queries (with one)."""

    columns: tuple[tuple[Counter, ...], ...]  # by key
    aggregations: Aggregations
    counts_all: bool  # `seen` as well: all events of the lead key

    @property
    def sql_types(self) -> dict[str, str]:
        """SQL type of each column that is returned."""
        counters = {c.column: c.sql_type for columns in self.columns for c in columns}
        return {"impression_id": "string"} | counters | ({SEEN: "int"} if self.counts_all else {})

    @property
    def sql_schema(self) -> str:
        """The columns that are returned, as Spark declares them."""
        return ", ".join(f"{name} {sql_type}" for name, sql_type in self.sql_types.items())

    def count_partition(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Counters of each query of a partition that is sorted by `lead`."""
        names = list(self.sql_types)
        for table in regroup_batches(batches, "lead"):
            yield pa.record_batch(self._count_table(table), names=names)

    def _count_table(self, table: pa.Table) -> list[pa.Array]:
        """Impression ids, then the counters of each column."""
        is_query = table["impression_id"].is_valid().to_numpy()
        arrays = [table["impression_id"].filter(pa.array(is_query)).combine_chunks()]
        for index in range(len(self.columns)):
            arrays += self._count_key(table, is_query, f"key_hash_{index}")
        if self.counts_all:
            lead, ts = table["lead"].to_numpy(), table["visible_ts"].to_numpy()
            seen = count_all_before(lead[~is_query], ts[~is_query], lead[is_query], ts[is_query])
            arrays.append(pa.array(seen))
        return arrays

    def _count_key(self, table: pa.Table, is_query: Bools, key_column: str) -> Iterator[pa.Array]:
        """The counters of one key; a query whose key is missing matches no event."""
        has_key = table[key_column].is_valid().to_numpy()
        is_event, is_counted = ~is_query & has_key, (is_query & has_key)[is_query]
        key = table[key_column].fill_null(0).to_numpy()
        ts = table["visible_ts"].to_numpy()
        dwell = None
        if self.aggregations.dwell_types:
            dwell = round_dwell_ms(table["dwell_ms"].to_numpy()[is_event])
        events = KeyedEvents.align(
            key[is_event], ts[is_event], table["type"].to_numpy()[is_event].astype(np.int64),
            key[is_query][is_counted], ts[is_query][is_counted],
            self.aggregations.longest_window, dwell,
        )  # fmt: skip
        for values, missing, arrow_type in self._aggregate(events):
            rows = np.full((len(is_counted), values.shape[1]), missing, values.dtype)
            rows[is_counted] = values
            for column in rows.T:
                yield pa.array(column, arrow_type, from_pandas=True)

    def _aggregate(
        self, events: KeyedEvents
    ) -> Iterator[tuple[npt.NDArray[Any], float, pa.DataType]]:
        """Values (Q, n) by kind, in the order of their columns; the value of a query without key.

        NaN is null.
        """
        of = self.aggregations
        longest = of.longest_window
        yield events.counts(of.windows, of.count_types), 0, pa.int32()
        decayed = events.decayed_counts(of.half_lives, of.count_types, longest)
        yield decayed.astype(np.float32), 0, pa.float32()
        yield events.seconds_since_last(of.last_types, longest), np.nan, pa.int32()
        dwells = events.mean_dwells(of.windows, of.dwell_types)
        yield dwells.astype(np.float32), np.nan, pa.float32()
