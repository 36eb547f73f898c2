"""Many days of packed histories as one, in long rows, without what is too old to be read."""

import functools
from collections.abc import Iterator
from datetime import date, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F

from etl.errors import UserError
from etl.spec.model import DataSpec
from etl.spec.units import DAY
from etl.tables import contracts, delta
from etl.tables.lake import Lake
from features.groups import run_starts, whole_groups
from features.history.pack import gaps, visible_from
from features.history.planes import COLUMNS, split, unpack
from features.ranges import ranges

CHUNK = 1024  # events of a row
COMPACTED = ", ".join(
    (
        "user_id string, chunk int, dropped int, first_ts bigint, events int",
        *(f"{name} binary" for name in contracts.HISTORY_PLANES),
    )
)


def compact(lake: Lake, until: date) -> dict[str, int]:
    """Replace all days of `history` up to one by a single one, cut as the spec's `history` says.

    Pointers into it stay as they are. Raises UserError for days that later steps still have to
    tell apart.
    """
    spec = lake.spec
    newest, most = lake.days("history")[1], timedelta(days=days_back(spec) + 1)
    if until > newest - most:
        raise UserError(
            f"--until {until}: examples of later days are counted from days before them; compact "
            f"up to {newest - most} at most"
        )
    version = lake.version("history")
    contract = contracts.history(spec)
    rows = delta.read(lake, contract, version).filter(F.col("day") <= F.lit(until))
    rows = rows.repartition("user_id").sortWithinPartitions("user_id", "day", "chunk")
    oldest = spec.day_end(until) - spec.history.max_age
    cut = functools.partial(compact_partition, spec.history.most_events, oldest)
    packed = rows.select("user_id", "dropped", "first_ts", "events", *COLUMNS).mapInArrow(
        cut, COMPACTED
    )
    packed = packed.withColumn("bucket", delta.bucket_of(F.col("user_id"), spec.buckets))
    packed = packed.withColumn("day", F.lit(until))
    delta.replace(lake, contract, packed, f"day <= '{until}'", {"history": version})
    return {"compacted rows": lake.rows(contract.name, (until, until))}


def days_back(spec: DataSpec) -> int:
    """Days before the first example's day that its counters reach."""
    return -(-(max(spec.counters.windows, default=0) + spec.lateness) // DAY)


def refuse_compacted(lake: Lake, day: date) -> None:
    """Raises UserError where histories up to a day can no longer be told from older ones."""
    until = compacted_until(lake)
    if until and lake.days("events")[0] < day <= until:
        raise UserError(
            f"histories up to {until} are compacted: {day} can no longer be told from the days "
            f"before; start at the first day, or after {until}"
        )


def compacted_until(lake: Lake) -> date | None:
    """The day up to which histories are compacted, by the table's log alone."""
    if not lake.exists("history"):
        return None
    files = lake.files("history")
    chunks = pc.greater(files["num_records"], pc.fill_null(files["null_count.chunk"], 0))
    until: date | None = pc.max(files.filter(chunks)["partition.day"]).as_py()
    return until


def compact_partition(
    most: int, oldest: int, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Sorted packed rows to long ones, user by user."""
    for users in whole_groups(batches, "user_id"):
        yield from compact_users(users.combine_chunks(), most, oldest).to_batches()


def compact_users(rows: pa.Table, most: int, oldest: int) -> pa.Table:
    """The last `most` events of each user that were visible at `oldest` or later.

    The newest event of each stays in any case, so that the number of those dropped is kept.
    """
    lengths = rows["events"].to_numpy().astype(np.int64)
    flat = unpack(rows, lengths)
    row_offsets = np.concatenate(([0], np.cumsum(lengths)))
    first_row = run_starts(users := rows["user_id"].combine_chunks())
    offsets = np.append(row_offsets[first_row], row_offsets[-1])
    visible = visible_from(rows["first_ts"].to_numpy(), flat["gaps"], row_offsets)

    user = np.repeat(np.arange(len(first_row)), np.diff(offsets))
    from_end = offsets[1:][user] - 1 - np.arange(len(user))
    kept = ((from_end < most) & (visible >= oldest)) | (from_end == 0)
    counts = np.bincount(user[kept], minlength=len(first_row))
    gone = np.add.reduceat(rows["dropped"].to_numpy(), first_row) + np.diff(offsets) - counts
    place = ranges(np.zeros_like(counts), counts)
    starts = np.flatnonzero(place % CHUNK == 0)
    owner, chunk = user[kept][starts], place[starts] // CHUNK

    cuts = np.append(starts, len(place))
    columns = {
        "user_id": users.take(pa.array(first_row[owner])),
        "chunk": pa.array(chunk.astype(np.int32)),
        "dropped": pa.array(np.where(chunk == 0, gone[owner], 0).astype(np.int32)),
        "first_ts": pa.array(visible[kept][starts]),
        "events": pa.array(np.diff(cuts).astype(np.int32)),
    }
    lists = {name: values[kept] for name, values in flat.items()}
    for name, values in (lists | {"gaps": gaps(visible[kept], starts)}).items():
        columns |= split(name, values, cuts)
    return pa.table(columns)
