"""Build of `history`: a day's newly visible events, packed to one row per user and day."""

from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from etl.ingest.timestamps import local_date
from etl.spec.attributes import NumericAttribute
from etl.spec.model import DataSpec
from etl.spec.units import MICROS, DayRange
from etl.tables import schemas, spark_io, user_schemas
from etl.tables.declared_columns import history_attributes
from etl.tables.lake import Lake
from etl.tables.weekly_snapshots import remove_snapshots_from
from features.encoding.spark import encode_attribute
from features.history.codec import (
    attribute_columns,
    delta_encode,
    quantize_dwell,
    quantize_number,
    split_byte_planes,
)
from features.history.compact import require_rebuildable
from features.history.event_counts import build_event_counts
from features.items import item_index_or_hash_bucket
from features.ragged import regroup_batches, run_starts

PACKED_SCHEMA = "user_id string, day date, first_ts bigint, events int"


def build_history(lake: Lake, days: DayRange) -> dict[str, int]:
    """Replace the given days of `history` with the events that became visible on them.

    Snapshots of `user_event_counts` are written for these days and those after them.

    Pointers of later examples stay valid only if the rebuilt days hold the same events (the reader
    checks). Raises UserError where some of the days are compacted together with others.
    """
    spec = lake.spec
    require_rebuildable(lake, days)
    versions = {name: lake.version(name) for name in ("events", "items")}
    schema = schemas.history(spec)
    remove_snapshots_from(lake, user_schemas.user_event_counts(spec), days[0])
    packed = pack_events(newly_visible_events(lake, versions, days))
    packed = packed.withColumn("bucket", spark_io.user_bucket(F.col("user_id"), spec.buckets))
    packed = packed.withColumns({"chunk": F.lit(None), "dropped": F.lit(0)})
    spark_io.replace_partitions(lake, schema, packed, spark_io.day_range_predicate(*days), versions)
    build_event_counts(lake, days[0])
    return {"histories": lake.count_rows(schema.name, days)}


def newly_visible_events(lake: Lake, versions: dict[str, int], days: DayRange) -> DataFrame:
    """Events that became visible on the given days, with their item index."""
    spec = lake.spec
    first_second, last_second = spec.day_start(days[0]), spec.day_end(days[1]) - 1
    first_arrived = days[0] - timedelta(days=spec.visibility_delay_days)
    events = spark_io.read_table(lake, schemas.events(spec), versions["events"])
    events = events.filter(spark_io.day_range_predicate(first_arrived, days[1]))
    visible = events.filter(F.col("visible_ts").between(first_second, last_second))
    items = spark_io.read_table(lake, schemas.items(spec), versions["items"])
    rows = visible.join(items.select("item_id", "item_index"), "item_id", "left")
    return rows.select(
        "user_id",
        local_date(spec, F.col("visible_ts")).alias("day"),
        "visible_ts",
        "event_ts",
        "event_id",
        item_index_or_hash_bucket().alias("item_index"),
        "surface",
        "type",
        "dwell_ms",
        *_history_attributes(spec),
    )


def _history_attributes(spec: DataSpec) -> list[Column]:
    """The embedding rows of categories, and numbers as they were logged."""
    columns = []
    for name, attribute in history_attributes(spec).items():
        value = F.col(f"event_{name}")
        is_number = isinstance(attribute, NumericAttribute)
        encoded = value if is_number else encode_attribute(attribute, value)
        columns.append(encoded.alias(f"attr_{name}"))
    return columns


def pack_events(events: DataFrame) -> DataFrame:
    """One packed row per user and day, from the columns of `newly_visible_events`."""
    ordered = events.repartition("user_id").sortWithinPartitions(
        "user_id", "visible_ts", "event_ts", "event_id"
    )
    planes = (*schemas.HISTORY_BYTE_PLANES, *attribute_columns(events.columns))
    packed_schema = ", ".join((PACKED_SCHEMA, *(f"{name} binary" for name in planes)))
    return ordered.drop("event_id").mapInArrow(pack_partition, packed_schema)


def pack_partition(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Packed rows of a partition that is sorted by user and visibility."""
    for users in regroup_batches(batches, "user_id"):
        yield from pack_user_days(users).to_batches()


def pack_user_days(events: pa.Table) -> pa.Table:
    """One packed row per user and day, from events sorted by user and visibility."""
    events = events.combine_chunks()
    users, days = events["user_id"].combine_chunks(), events["day"].cast(pa.int32()).to_numpy()
    day_changes = np.flatnonzero(np.diff(days, prepend=days[:1]))
    starts = np.union1d(run_starts(users), day_changes)
    offsets = np.append(starts, events.num_rows)
    visible_ts = events["visible_ts"].to_numpy()
    lists = {
        "gaps": delta_encode(visible_ts, starts),
        "lags": (visible_ts - events["event_ts"].to_numpy() // MICROS["s"]).astype(np.int32),
        "items": events["item_index"].to_numpy().astype(np.int32),
        "surfaces": events["surface"].to_numpy(),
        "types": events["type"].to_numpy(),
        "dwells": quantize_dwell(events["dwell_ms"].to_numpy().astype(np.float64)),
    }
    for name in attribute_columns(events.column_names):
        values = events[name].to_numpy()
        is_category = pa.types.is_integer(events[name].type)
        lists[name] = values.astype(np.uint8) if is_category else quantize_number(values)
    columns = {
        "user_id": users.take(pa.array(starts)),
        "day": pa.array(days[starts], pa.int32()).cast(pa.date32()),
        "first_ts": pa.array(visible_ts[starts]),
        "events": pa.array(np.diff(offsets).astype(np.int32)),
    }
    for name, values in lists.items():
        columns |= split_byte_planes(name, values, offsets)
    return pa.table(columns)
