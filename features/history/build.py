"""A day's newly visible events, packed to one row a user and appended to the histories."""

from collections.abc import Iterator
from datetime import date, timedelta

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from etl.spec.model import DataSpec
from etl.spec.units import DAY, MICROS
from etl.tables import contracts, delta
from etl.tables.lake import Lake
from features.groups import run_starts, whole_groups
from features.history.pack import dwell_byte, gaps

PACKED = (
    "user_id string, day date, start int, first_ts bigint, gaps array<int>, lags array<int>, "
    "items array<int>, surfaces array<tinyint>, types array<tinyint>, dwells array<tinyint>"
)


def build_history(lake: Lake, days: tuple[date, date]) -> dict[str, int]:
    """Replace the given days of `history`: the events that became visible on them.

    Days before must be there; the events of later days, if any, keep their place only if these
    days are rebuilt as they were (the reader checks).
    """
    spec = lake.spec
    versions = {name: lake.version(name) for name in ("events", "items")}
    contract = contracts.history(spec)
    rows = newly_visible(lake, versions, days)
    if lake.exists(contract.name):
        versions["history"] = lake.version(contract.name)
        before = events_before(lake, versions["history"], days[0])
    else:
        before = rows.select("user_id").limit(0).withColumn("total", F.lit(0))
    marked = rows.withColumn("total", F.lit(None).cast("int")).unionByName(
        before, allowMissingColumns=True
    )
    ordered = marked.repartition("user_id").sortWithinPartitions(
        "user_id", F.asc_nulls_first("visible_ts"), "event_ts", "event_id"
    )
    packed = ordered.drop("event_id").mapInArrow(pack_partition, PACKED)
    packed = packed.withColumn("bucket", delta.bucket_of(F.col("user_id"), spec.buckets))
    delta.replace(lake, contract, packed, delta.days_between(*days), versions)
    return {"histories": lake.rows(contract.name, days)}


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
        F.coalesce("item_ix", F.lit(0)).alias("item_ix"),
        "surface",
        "type",
        "dwell_ms",
    )


def visible_after_days(spec: DataSpec) -> int:
    """Days after its landing by which every event is visible."""
    slowest = max(log.delay for log in spec.logs.values())
    return -(-(spec.lateness + slowest) // DAY) + 1


def day_of(spec: DataSpec, seconds: Column) -> Column:
    """The spec's day of an epoch second."""
    local = (seconds + spec.utc_offset_hours * 3600) / DAY
    return F.date_from_unix_date(F.floor(local).cast("int"))


def events_before(lake: Lake, version: int, day: date) -> DataFrame:
    """Number of events of each user before a day: `user_id`, `total`."""
    history = delta.read(lake, contracts.history(lake.spec), version)
    rows = history.filter(F.col("day") < F.lit(day))
    total = (F.col("start") + F.size("gaps")).alias("total")
    return rows.select("user_id", total).groupBy("user_id").agg(F.max("total").alias("total"))


def pack_partition(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Sorted events to packed rows, user by user; a row that has `total` opens its user."""
    for users in whole_groups(batches, "user_id"):
        table = pack_users(users)
        yield from table.to_batches()


def pack_users(rows: pa.Table) -> pa.Table:
    """One packed row a user and day."""
    rows = rows.combine_chunks()
    totals = rows["total"].to_numpy()
    opening = ~np.isnan(totals) if totals.dtype.kind == "f" else np.ones(len(totals), bool)
    user_starts = run_starts(rows["user_id"].combine_chunks())
    user_of = np.repeat(np.arange(len(user_starts)), np.diff(np.append(user_starts, rows.num_rows)))
    before = np.zeros(len(user_starts), np.int64)
    before[user_of[opening]] = totals[opening].astype(np.int64)

    events, user_of = rows.filter(pa.array(~opening)), user_of[~opening]
    days = events["day"].cast(pa.int32()).to_numpy()
    starts = np.flatnonzero(
        np.diff(user_of, prepend=-1).astype(bool) | np.diff(days, prepend=-1).astype(bool)
    )
    first_of_user = np.searchsorted(user_of, user_of[starts])
    visible = events["visible_ts"].to_numpy()
    lags = (visible - events["event_ts"].to_numpy() // MICROS["s"]).astype(np.int32)
    dwell = dwell_byte(events["dwell_ms"].to_numpy().astype(np.float64))
    offsets = pa.array(np.append(starts, events.num_rows).astype(np.int32))
    lists = {
        "gaps": gaps(visible, starts) if len(starts) else np.zeros(0, np.int32),
        "lags": lags,
        "items": events["item_ix"].to_numpy().astype(np.int32),
        "surfaces": events["surface"].to_numpy(),
        "types": events["type"].to_numpy(),
        "dwells": dwell,
    }
    return pa.table(
        {
            "user_id": events["user_id"].take(pa.array(starts)),
            "day": pa.array(days[starts], pa.int32()).cast(pa.date32()),
            "start": (before[user_of[starts]] + starts - first_of_user).astype(np.int32),
            "first_ts": visible[starts],
            **{n: pa.ListArray.from_arrays(offsets, pa.array(v)) for n, v in lists.items()},
        }
    )


if __name__ == "__main__":
    import sys

    from etl.cli import run
    from features.commands import history as command

    sys.exit(run(command, sys.argv[1:], "features/history/build.py"))
