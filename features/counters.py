"""Point-in-time counters: how many events precede each impression, by key, window and type.

The counting itself is NumPy on sorted arrays; Spark groups the rows that share the first part of a
key.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from etl.spec.model import DataSpec
from features.ragged import count_visible, regroup_batches
from features.schema import counters

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Key = tuple[str, ...]


def count_all_before(key: Int64, ts: Int64, query_key: Int64, query_ts: Int64) -> Int32:
    """The number of events with each query's key before its time (Q)."""
    one_type = np.zeros(len(key), np.int64)
    all_time = max(1, int(query_ts.max(initial=0) - ts.min(initial=0)))
    return windowed_counts_before(key, ts, one_type, query_key, query_ts, (all_time,), (0,))[:, 0]


def windowed_counts_before(
    event_key: Int64,
    event_ts: Int64,
    event_type: Int64,
    query_key: Int64,
    query_ts: Int64,
    windows: tuple[int, ...],
    types: tuple[int, ...],
) -> Int32:
    """Events with each query's key in [query_ts - window, query_ts), by window and type.

    Returns counts (Q, len(windows) * len(types)), types within windows. Keys are any integers;
    times are in seconds.
    """
    keys, group = np.unique(np.concatenate((event_key, query_key)), return_inverse=True)
    event_group, query_group = group[: len(event_key)], group[len(event_key) :]
    origin = min(event_ts.min(initial=0), query_ts.min(initial=0) - max(windows, default=0))
    latest = max(event_ts.max(initial=origin), query_ts.max(initial=origin))
    span = latest - origin + 1
    assert len(keys) * span < 2**62, "times and keys do not fit one integer"

    # One sorted axis of (key, time): a window is the difference of two positions on it.
    event_position = event_group * span + (event_ts - origin)
    order = np.argsort(event_position, kind="stable")
    event_position = event_position[order]
    total = np.zeros((len(order) + 1, len(types)), np.int32)
    np.cumsum(event_type[order, None] == np.array(types), axis=0, out=total[1:])

    end = query_group * span + (query_ts - origin)
    total_at_end = total[count_visible(event_position, end)]
    counts = [
        total_at_end - total[count_visible(event_position, end - window)] for window in windows
    ]
    return np.concatenate(counts, axis=1)


def count_events(spec: DataSpec, events: DataFrame, queries: DataFrame) -> DataFrame:
    """`impression_id`, all counters of the spec, and `seen`: all `events` of the user before it.

    `events` have visible_ts, type and a bigint column for each part of a key (`key_user`, ...);
    `queries` have impression_id, as_of_ts and the same key columns.
    """
    columns_by_key: dict[Key, list[str]] = {}
    for counter in counters(spec):
        columns_by_key.setdefault(counter.key, []).append(counter.column)
    lead_parts = dict.fromkeys([*(key[0] for key in columns_by_key), "user"])
    counted = []
    for lead_part in lead_parts:
        own_columns = {key: c for key, c in columns_by_key.items() if key[0] == lead_part}
        counted.append(_count_by_lead_part(spec, events, queries, lead_part, own_columns))
    return functools.reduce(lambda a, b: a.join(b, "impression_id"), counted)


def _count_by_lead_part(
    spec: DataSpec,
    events: DataFrame,
    queries: DataFrame,
    lead_part: str,
    columns_by_key: dict[Key, list[str]],
) -> DataFrame:
    """Counters of all keys that begin with `lead_part`: rows are grouped by it."""
    key_hashes = [_hash_key(key).alias(f"key_hash_{i}") for i, key in enumerate(columns_by_key)]
    lead_key = F.coalesce(f"key_{lead_part}", F.lit(0)).alias("lead")
    no_id = F.lit(None).cast("string").alias("impression_id")
    event_rows = events.filter(F.col(f"key_{lead_part}").isNotNull())
    event_rows = event_rows.select(lead_key, "visible_ts", "type", no_id, *key_hashes)
    query_rows = queries.select(
        lead_key,
        F.col("as_of_ts").alias("visible_ts"),
        F.lit(0).cast("tinyint").alias("type"),
        "impression_id",
        *key_hashes,
    )
    rows = event_rows.unionByName(query_rows).repartition("lead").sortWithinPartitions("lead")
    counting = _PartitionCounting(
        columns=tuple(column for columns in columns_by_key.values() for column in columns),
        num_keys=len(columns_by_key),
        windows=spec.counters.windows,
        types=tuple(spec.event_codes[event] for event in spec.counters.events),
        counts_all=lead_part == "user",
    )
    return rows.mapInArrow(counting.count_partition, counting.sql_schema)


def _hash_key(key: Key) -> Column:
    """One integer for a combination of key parts; null where one of them is missing."""
    columns = [F.col(f"key_{part}") for part in key]
    is_complete = functools.reduce(Column.__and__, [column.isNotNull() for column in columns])
    return F.when(is_complete, columns[0] if len(columns) == 1 else F.xxhash64(*columns))


@dataclass(frozen=True)
class _PartitionCounting:
    """Counting of a partition's rows of events (without impression_id) and queries (with one)."""

    columns: tuple[str, ...]
    num_keys: int
    windows: tuple[int, ...]
    types: tuple[int, ...]
    counts_all: bool  # `seen` as well: all events of the lead key

    @property
    def count_columns(self) -> list[str]:
        """Names of the columns of counts."""
        return [*self.columns, "seen"] if self.counts_all else list(self.columns)

    @property
    def sql_schema(self) -> str:
        """The columns that are returned, as Spark declares them."""
        return ", ".join(["impression_id string", *(f"{name} int" for name in self.count_columns)])

    def count_partition(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Counts of each query of a partition that is sorted by `lead`."""
        names = ["impression_id", *self.count_columns]
        for table in regroup_batches(batches, "lead"):
            yield pa.record_batch(self._count_table(table), names=names)

    def _count_table(self, table: pa.Table) -> list[pa.Array]:
        """Impression ids, then the counts of each column; a missing key counts 0."""
        is_query = table["impression_id"].is_valid().to_numpy()
        ts = table["visible_ts"].to_numpy()
        type_ = table["type"].to_numpy().astype(np.int64)
        arrays = [table["impression_id"].filter(pa.array(is_query)).combine_chunks()]
        for index in range(self.num_keys):
            column = table[f"key_hash_{index}"]
            has_key = column.is_valid().to_numpy()
            key = column.fill_null(0).to_numpy()
            is_event = ~is_query & has_key
            counts = windowed_counts_before(
                key[is_event], ts[is_event], type_[is_event], key[is_query], ts[is_query],
                self.windows, self.types,
            )  # fmt: skip
            counts *= has_key[is_query, None]
            arrays += [pa.array(column_counts) for column_counts in counts.T]
        if self.counts_all:
            lead = table["lead"].to_numpy()
            seen = count_all_before(lead[~is_query], ts[~is_query], lead[is_query], ts[is_query])
            arrays.append(pa.array(seen))
        return arrays
