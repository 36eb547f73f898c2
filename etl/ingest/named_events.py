"""Users, items, surfaces and impressions of events that name an earlier event.

Such as off-site conversions, which only have the id of an impression or of a click. What is named
must have landed on the day of the event or before it, so that each day depends on days up to it
alone.
"""

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from etl.ingest.normalize import NAMED_FIELDS
from etl.ingest.readers import PAYLOAD
from etl.spec.model import DataSpec
from etl.spec.sources import EventLogSource
from etl.spec.units import DayRange
from etl.tables import schemas, spark_io
from etl.tables.lake import Lake

UNKNOWN_EVENT = "names no known event"
FIELDS = tuple(NAMED_FIELDS.values())


@contextmanager
def with_named_fields(lake: Lake, records: DataFrame, stored_days: DayRange) -> Iterator[DataFrame]:
    """Normalized records in which valid events have the fields of the events that they name.

    These are the fields that their log lacks, and the impression of a touch. They are looked up
    among the records, and in the tables on `stored_days`. An event becomes visible no earlier than
    what it names. One without a field is invalid, with the reason UNKNOWN_EVENT. Logs that name
    impressions come first, because others may name their events. What was looked up is cached in
    the context.
    """
    spec = lake.spec
    logs = [
        (name, log)
        for name, log in spec.log_sources.items()
        if isinstance(log, EventLogSource) and log.names_events
    ]
    with ExitStack() as stack:
        for name, log in sorted(logs, key=lambda item: bool(item[1].columns.touch)):
            is_of_log = F.coalesce((F.col("log") == name) & (F.col("reasons") == ""), F.lit(False))
            named = _first_copies(spec, log, _stored_and_new(lake, records, stored_days))
            completed = _complete(log, records.filter(is_of_log), named)
            completed = completed.persist(StorageLevel.MEMORY_AND_DISK)
            stack.callback(completed.unpersist)
            records = records.filter(~is_of_log).unionByName(completed)
        yield records


def lookup_days(spec: DataSpec, days: DayRange) -> DayRange:
    """The days before some days on which events landed that events of these may name."""
    window = spec.label_maturity_days + spec.allowed_lateness_days + 1
    return days[0] - timedelta(days=window), days[0] - timedelta(days=1)


def copy_order(spec: DataSpec) -> tuple[str | Column, ...]:
    """The order of the copies of an event: by the day and time at which they landed."""
    return "day", "ingest_ts", F.xxhash64(*[F.col(name) for name in _event_columns(spec)])


def _event_columns(spec: DataSpec) -> list[str]:
    """The columns that valid events have in any table."""
    return [name for name in schemas.excluded_events(spec).columns if name != "reason"]


def _stored_and_new(lake: Lake, records: DataFrame, stored_days: DayRange) -> DataFrame:
    """The valid events with all fields among normalized records, and those of some days."""
    columns = _event_columns(lake.spec)
    parts = [records.filter("reasons = ''").dropna(subset=list(FIELDS)).select(columns)]
    for schema in (schemas.events(lake.spec), schemas.excluded_events(lake.spec)):
        if lake.exists(schema.name):
            rows = spark_io.read_table(lake, schema)
            parts.append(rows.filter(spark_io.day_range_predicate(*stored_days)).select(columns))
    return functools.reduce(DataFrame.unionByName, parts)


def _first_copies(spec: DataSpec, log: EventLogSource, events: DataFrame) -> DataFrame:
    """The first copy of each event that records of a log may name, with the prefix `of_`."""
    key = "event_id" if log.columns.touch else "impression_id"
    type_ = spec.event_codes[log.touch or spec.impression_type]
    copy = F.row_number().over(Window.partitionBy(key).orderBy(*copy_order(spec)))
    first = events.filter(F.col("type") == type_).withColumn("copy", copy).filter("copy = 1")
    columns = ("impression_id", "day", "visible_ts", *FIELDS)
    return first.select(
        F.col(key).alias("of"), *[F.col(name).alias(f"of_{name}") for name in columns]
    )


def _complete(log: EventLogSource, events: DataFrame, named: DataFrame) -> DataFrame:
    """Events of a log with the fields of the events that they name, or with UNKNOWN_EVENT."""
    name = F.col("logged_touch_id" if log.columns.touch else "logged_impression_id")
    is_earlier = F.col("of_day") <= F.col("day")
    rows = events.join(named, (name == F.col("of")) & is_earlier, "left")
    lacks_fields = F.col("of").isNull() & F.lit(bool(log.fields_of_named))
    changes = {
        "reasons": F.when(lacks_fields, UNKNOWN_EVENT).otherwise(""),
        PAYLOAD: F.when(lacks_fields, F.col(PAYLOAD)),
        "visible_ts": F.greatest("visible_ts", "of_visible_ts"),
        "impression_id": F.coalesce("impression_id", "of_impression_id"),
    }
    changes |= {NAMED_FIELDS[n]: F.col(f"of_{NAMED_FIELDS[n]}") for n in log.fields_of_named}
    return rows.withColumns(changes).select(events.columns)
