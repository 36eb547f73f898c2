"""What compaction has left of `history`, read without Spark (see compact.py)."""

from dataclasses import dataclass, replace
from datetime import date

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.array_types import Int64
from etl.tables import arrow, schemas
from etl.tables.arrow import Snapshot
from etl.tables.lake import Lake
from features.history.codec import decode_rows, delta_decode, plane_columns


@dataclass(frozen=True)
class FirstEvents:
    """Where the histories of the users (U) begin whose older events compaction has dropped.

    `visible_ts` (U) is the second at which the first event that is left became visible, and
    `num_events` (U) how many of the events that are left became visible in that second.
    """

    users: pa.Array
    visible_ts: Int64
    num_events: Int64


def compacted_until(lake: Lake) -> date | None:
    """The day up to which histories are compacted, from the table's log alone; None if not."""
    if not lake.exists("history"):
        return None
    files = lake.add_actions("history")
    has_chunks = pc.greater(files["num_records"], pc.fill_null(files["null_count.chunk"], 0))
    until: date | None = pc.max(files.filter(has_chunks)["partition.day"]).as_py()
    return until


def compacted_histories(lake: Lake, last_day: date) -> Snapshot | None:
    """The compacted rows of `history`; None if there are none, or they have days after the last."""
    until = compacted_until(lake)
    if until is None or until > last_day:
        return None
    history = arrow.snapshot(lake, schemas.history(lake.spec))
    return replace(history, files=tuple(file for file in history.files if file[1]["day"] == until))


def first_events(compacted: Snapshot, bucket: int, event_types: tuple[int, ...]) -> FirstEvents:
    """The first events in compacted rows of a bucket, of users of whom events were dropped.

    Counts those of `event_types` (codes), or all events if it is empty.
    """
    columns = ["user_id", "chunk", "dropped", "first_ts", "events"]
    columns += [*plane_columns("gaps"), *plane_columns("types")]
    rows = compacted.read(columns, bucket=bucket)
    rows = rows.filter((pc.field("chunk") == 0) & (pc.field("dropped") > 0)).combine_chunks()
    lengths, first_ts = rows["events"].to_numpy().astype(np.int64), rows["first_ts"].to_numpy()
    lists = decode_rows(rows, lengths)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    owner = np.repeat(np.arange(len(rows)), lengths)
    is_counted = delta_decode(first_ts, lists["gaps"], offsets) == first_ts[owner]
    if event_types:
        is_counted &= np.isin(lists["types"], event_types)
    num_events = np.bincount(owner[is_counted], minlength=len(rows)).astype(np.int64)
    return FirstEvents(rows["user_id"].combine_chunks(), first_ts, num_events)
