"""A day's newly visible events, packed to one row a user and appended to the histories."""

from collections.abc import Iterator
from datetime import date, timedelta

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from etl.local_time import day_of
from etl.spec.model import DataSpec
from etl.spec.units import DAY, MICROS
from etl.tables import contracts, delta
from etl.tables.lake import Lake
from features.groups import run_starts, whole_groups
from features.history.compact import refuse_compacted
from features.history.pack import dwell_byte, gaps
from features.history.planes import split
from features.items import item_index

PACKED = ", ".join(
    (
        "user_id string, day date, first_ts bigint, events int",
        *(f"{name} binary" for name in contracts.HISTORY_PLANES),
    )
)


def build_history(lake: Lake, days: tuple[date, date]) -> dict[str, int]:
    """Replace the given days of `history`: the events that became visible on them.

    Examples of later days keep their place in it only if these days are rebuilt as they were (the
    reader checks). Raises UserError where they are compacted.
    """
    spec = lake.spec
    refuse_compacted(lake, days[0])
    versions = {name: lake.version(name) for name in ("events", "items")}
    contract = contracts.history(spec)
    packed = pack_rows(newly_visible(lake, versions, days))
    packed = packed.withColumn("bucket", delta.bucket_of(F.col("user_id"), spec.buckets))
    packed = packed.withColumns({"chunk": F.lit(None), "dropped": F.lit(0)})
    delta.replace(lake, contract, packed, delta.days_between(*days), versions)
    return {"histories": lake.rows(contract.name, days)}


def pack_rows(events: DataFrame) -> DataFrame:
    """Events of `newly_visible` to one packed row a user and day."""
    ordered = events.repartition("user_id").sortWithinPartitions(
        "user_id", "visible_ts", "event_ts", "event_id"
    )
    return ordered.drop("event_id").mapInArrow(pack_partition, PACKED)


def newly_visible(lake: Lake, versions: dict[str, int], days: tuple[date, date]) -> DataFrame:
    """Events that became visible on the given days, with their item index."""
    spec = lake.spec
    first, last = spec.day_start(days[0]), spec.day_end(days[1]) - 1
    landed = delta.days_between(days[0] - timedelta(days=visible_after_days(spec)), days[1])
    events = delta.read(lake, contracts.events(spec), versions["events"])
    items = delta.read(lake, contracts.items(spec), versions["items"])
    visible = events.filter(landed).filter(F.col("visible_ts").between(first, last))
    rows = visible.join(items.select("item_id", "item_ix"), "item_id", "left")
    return rows.select(
        "user_id",
        day_of(spec, F.col("visible_ts")).alias("day"),
        "visible_ts",
        "event_ts",
        "event_id",
        item_index().alias("item_ix"),
        "surface",
        "type",
        "dwell_ms",
    )


def visible_after_days(spec: DataSpec) -> int:
    """Days after its landing by which every event is visible."""
    slowest = max(log.delay for log in spec.logs.values())
    return -(-(spec.lateness + slowest) // DAY) + 1


def events_before(lake: Lake, version: int, day: date) -> DataFrame:
    """Number of events of each user before a day: `user_id`, `total`."""
    refuse_compacted(lake, day)
    history = delta.read(lake, contracts.history(lake.spec), version)
    events = (F.col("events") + F.col("dropped")).alias("n")
    rows = history.filter(F.col("day") < F.lit(day)).select("user_id", events)
    return rows.groupBy("user_id").agg(F.sum("n").cast("int").alias("total"))


def pack_partition(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Sorted events to packed rows, user by user."""
    for users in whole_groups(batches, "user_id"):
        table = pack_users(users)
        yield from table.to_batches()


def pack_users(events: pa.Table) -> pa.Table:
    """One packed row a user and day."""
    events = events.combine_chunks()
    users, days = events["user_id"].combine_chunks(), events["day"].cast(pa.int32()).to_numpy()
    new_day = np.flatnonzero(np.diff(days, prepend=days[:1]))
    starts = np.union1d(run_starts(users), new_day)
    visible = events["visible_ts"].to_numpy()
    lags = (visible - events["event_ts"].to_numpy() // MICROS["s"]).astype(np.int32)
    cuts = np.append(starts, events.num_rows)
    lists = {
        "gaps": gaps(visible, starts),
        "lags": lags,
        "items": events["item_ix"].to_numpy().astype(np.int32),
        "surfaces": events["surface"].to_numpy(),
        "types": events["type"].to_numpy(),
        "dwells": dwell_byte(events["dwell_ms"].to_numpy().astype(np.float64)),
    }
    columns = {
        "user_id": users.take(pa.array(starts)),
        "day": pa.array(days[starts], pa.int32()).cast(pa.date32()),
        "first_ts": pa.array(visible[starts]),
        "events": pa.array(np.diff(cuts).astype(np.int32)),
    }
    for name, values in lists.items():
        columns |= split(name, values, cuts)
    return pa.table(columns)
