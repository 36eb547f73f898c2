"""Compaction of `history`: many days become one, in long rows, without events past retention."""

import functools
from collections.abc import Iterator
from datetime import date, timedelta

import numpy as np
import pyarrow as pa
from pyspark.sql import functions as F

from etl.errors import UserError
from etl.spec.units import DAY, DayRange
from etl.tables import schemas, spark_io
from etl.tables.lake import Lake
from features.history.codec import (
    PLANE_COLUMNS,
    attribute_columns,
    decode_rows,
    delta_decode,
    delta_encode,
    split_byte_planes,
)
from features.history.compacted import compacted_until
from features.ragged import concat_ranges, regroup_batches, run_starts
from features.schema import counter_horizon_days

EVENTS_PER_CHUNK = 1024  # events of a compacted row
COMPACTED_SCHEMA = "user_id string, chunk int, dropped int, first_ts bigint, events int"


def compact_history(lake: Lake, until: date) -> dict[str, int]:
    """Merge all days of `history` up to `until` into that day, cut to the retention of the spec.

    Pointers of examples into the history stay valid. Raises UserError where `until` is so recent
    that counters of later examples still need the days before it one by one.
    """
    spec = lake.spec
    last_compactable = last_compactable_day(lake)
    if until > last_compactable:
        raise UserError(
            f"--until {until}: counters of later examples need the days before them; compact "
            f"up to {last_compactable} at most"
        )
    version = lake.version("history")
    schema = schemas.history(spec)
    rows = spark_io.read_table(lake, schema, version).filter(F.col("day") <= F.lit(until))
    rows = rows.repartition("user_id").sortWithinPartitions("user_id", "day", "chunk")
    min_visible_ts = spec.day_end(until) - spec.history.max_age
    compact = functools.partial(compact_partition, spec.history.max_events, min_visible_ts)
    planes = (*PLANE_COLUMNS, *attribute_columns(rows.columns))
    compacted_schema = ", ".join((COMPACTED_SCHEMA, *(f"{name} binary" for name in planes)))
    rows = rows.select("user_id", "dropped", "first_ts", "events", *planes)
    packed = rows.mapInArrow(compact, compacted_schema)
    packed = packed.withColumn("bucket", spark_io.user_bucket(F.col("user_id"), spec.buckets))
    packed = packed.withColumn("day", F.lit(until))
    spark_io.replace_partitions(lake, schema, packed, f"day <= '{until}'", {"history": version})
    return {"compacted rows": lake.count_rows(schema.name, (until, until))}


def last_compactable_day(lake: Lake) -> date:
    """The last day before those that counters of later examples need one by one.

    Later examples begin with the oldest day that a run or a refresh builds again for late files.
    """
    _, last_day = lake.day_range("history")
    oldest_rebuilt = last_day - timedelta(days=max(1, lake.spec.allowed_lateness_days))
    return oldest_rebuilt - timedelta(days=counter_horizon_days(lake.spec) + 1)


def due_compaction(lake: Lake, keep_days: int) -> date | None:
    """The day up to which histories are to be compacted now; None if the next is not due yet.

    It is due when the spec's `compact_every` new days can be compacted. The latest `keep_days` days
    are not, so that examples of these days find the events that they point at.
    """
    if not lake.rows_by_day("history"):
        return None
    first_day, last_day = lake.day_range("history")
    until = min(last_compactable_day(lake), last_day - timedelta(days=keep_days))
    before = compacted_until(lake) or first_day - timedelta(days=1)
    is_due = (until - before).days >= lake.spec.history.compact_every // DAY
    return until if is_due else None


def require_not_compacted(lake: Lake, day: date) -> None:
    """Raises UserError if events before `day` are no longer stored separately from later ones."""
    until = compacted_until(lake)
    if until and lake.day_range("events")[0] < day <= until:
        raise UserError(
            f"histories up to {until} are compacted: {day} is no longer stored apart from the "
            f"days before it; start at the first day, or after {until}"
        )


def require_rebuildable(lake: Lake, days: DayRange) -> None:
    """Raises UserError if some days of `history` are compacted together with other days.

    Days can be replaced if they are all after the compacted ones, or if the compacted ones are
    replaced completely.
    """
    until = compacted_until(lake)
    if until is None or days[0] > until:
        return
    first_day = lake.day_range("events")[0]
    if days[0] > first_day or days[1] < until:
        raise UserError(
            f"histories up to {until} are compacted: {days[0]} to {days[1]} cannot be built again "
            f"apart from the other days; build {first_day}:{until}, also with later days, or days "
            f"after {until}"
        )


def compact_partition(
    max_events: int, min_visible_ts: int, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Compacted rows of a partition that is sorted by user, day and chunk."""
    for users in regroup_batches(batches, "user_id"):
        yield from compact_users(users.combine_chunks(), max_events, min_visible_ts).to_batches()


def compact_users(rows: pa.Table, max_events: int, min_visible_ts: int) -> pa.Table:
    """The last `max_events` events of each user that were visible at `min_visible_ts` or later.

    Rows hold up to EVENTS_PER_CHUNK events. The latest event of each user is always kept, so that
    there is a row to store the number of dropped events in.
    """
    lengths = rows["events"].to_numpy().astype(np.int64)
    lists = decode_rows(rows, lengths)
    row_offsets = np.concatenate(([0], np.cumsum(lengths)))
    visible_ts = delta_decode(rows["first_ts"].to_numpy(), lists["gaps"], row_offsets)
    user_ids = rows["user_id"].combine_chunks()
    first_rows = run_starts(user_ids)  # of each user
    user_offsets = np.append(row_offsets[first_rows], row_offsets[-1])

    user = np.repeat(np.arange(len(first_rows)), np.diff(user_offsets))
    newer_events = user_offsets[1:][user] - 1 - np.arange(len(user))
    retained = (newer_events < max_events) & (visible_ts >= min_visible_ts)
    retained |= newer_events == 0
    retained_counts = np.bincount(user[retained], minlength=len(first_rows))
    dropped_before = np.add.reduceat(rows["dropped"].to_numpy(), first_rows)
    dropped = dropped_before + np.diff(user_offsets) - retained_counts

    position = concat_ranges(np.zeros_like(retained_counts), retained_counts)
    starts = np.flatnonzero(position % EVENTS_PER_CHUNK == 0)
    owner, chunk = user[retained][starts], position[starts] // EVENTS_PER_CHUNK
    offsets = np.append(starts, len(position))
    columns = {
        "user_id": user_ids.take(pa.array(first_rows[owner])),
        "chunk": pa.array(chunk.astype(np.int32)),
        "dropped": pa.array(np.where(chunk == 0, dropped[owner], 0).astype(np.int32)),
        "first_ts": pa.array(visible_ts[retained][starts]),
        "events": pa.array(np.diff(offsets).astype(np.int32)),
    }
    retained_lists = {name: values[retained] for name, values in lists.items()}
    retained_lists["gaps"] = delta_encode(visible_ts[retained], starts)
    for name, values in retained_lists.items():
        columns |= split_byte_planes(name, values, offsets)
    return pa.table(columns)
