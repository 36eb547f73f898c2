"""Users, items, surfaces and impressions of events that name an earlier event.

Such as off-site conversions, which only have the id of an impression or of a click. What is named
must have landed on the day of the event or before it, so that each day depends on days up to it
alone.
"""

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta

from pyspark.sql import Column, DataFrame
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
            candidates = _stored_and_new(lake, log, records, stored_days)
            completed = _complete(spec, log, records.filter(is_of_log), candidates)
            completed = stack.enter_context(spark_io.cached(completed))
            records = records.filter(~is_of_log).unionByName(completed)
        yield records


def lookback_days(spec: DataSpec) -> int:
    """Days before the landing day of an event on which what it names may have landed.

    Outcomes that follow their impression by more than the window of an objective label nothing.
    """
    return spec.label_maturity_days + spec.allowed_lateness_days + 1


def lookup_days(spec: DataSpec, days: DayRange) -> DayRange:
    """The days before some days on which events landed that events of these may name."""
    return days[0] - timedelta(days=lookback_days(spec)), days[0] - timedelta(days=1)


def copy_order(spec: DataSpec) -> tuple[str | Column, ...]:
    """The order of the copies of an event: by the day and time at which they landed."""
    tie_breaker = F.xxhash64(*[F.col(name) for name in _event_columns(spec)])
    return "day", "ingest_ts", tie_breaker.alias("tie_breaker")


def _event_columns(spec: DataSpec) -> list[str]:
    """The columns that valid events have in any table."""
    return [name for name in schemas.excluded_events(spec).columns if name != "reason"]


def read_valid_events(lake: Lake, days: DayRange) -> DataFrame:
    """The stored valid events of a range of days, used or excluded, without `bucket`."""
    tables = []
    for schema in (schemas.events(lake.spec), schemas.excluded_events(lake.spec)):
        rows = spark_io.read_table(lake, schema, lake.version(schema.name))
        rows = rows.filter(spark_io.day_range_predicate(*days))
        tables.append(rows.select(_event_columns(lake.spec)))
    return functools.reduce(DataFrame.unionByName, tables)


def _stored_and_new(
    lake: Lake, log: EventLogSource, records: DataFrame, stored_days: DayRange
) -> DataFrame:
    """The valid events of the type that a log names, with all fields.

    They are among normalized records, and in the tables on some days.
    """
    type_ = lake.spec.event_codes[log.touch or lake.spec.impression_type]
    events = records.filter("reasons = ''").dropna(subset=list(FIELDS))
    events = events.select(_event_columns(lake.spec))
    if lake.exists("events"):  # which ingest writes last
        events = events.unionByName(read_valid_events(lake, stored_days))
    return events.filter(F.col("type") == type_)


def _complete(
    spec: DataSpec, log: EventLogSource, events: DataFrame, candidates: DataFrame
) -> DataFrame:
    """Events of a log with the fields of the candidates that they name, or with UNKNOWN_EVENT.

    Of several copies, the first counts that landed in the days that the event may name.
    """
    name = "logged_touch_id" if log.columns.touch else "logged_impression_id"
    key = F.col("event_id" if log.columns.touch else "impression_id").alias(name)
    copy = F.struct("day", *copy_order(spec)[1:], "impression_id", "visible_ts", *FIELDS)
    copies = candidates.select(key, copy.alias("copy"))
    copies = copies.join(events.select(name).distinct(), name, "left_semi")
    copies = copies.groupBy(name).agg(F.sort_array(F.collect_list("copy")).alias("copies"))
    first_day = F.date_sub("day", lookback_days(spec))
    named = F.get(F.filter("copies", lambda c: c["day"].between(first_day, F.col("day"))), F.lit(0))
    rows = events.join(copies, name, "left").withColumn("named", named)
    lacks_fields = F.col("named").isNull() & F.lit(bool(log.fields_of_named))
    changes = {
        "reasons": F.when(lacks_fields, UNKNOWN_EVENT).otherwise(""),
        PAYLOAD: F.when(lacks_fields, F.col(PAYLOAD)),
        "visible_ts": F.greatest("visible_ts", "named.visible_ts"),
        "impression_id": F.coalesce("impression_id", "named.impression_id"),
    }
    columns = [NAMED_FIELDS[field] for field in log.fields_of_named]
    changes |= {column: F.col(f"named.{column}") for column in columns}
    return rows.withColumns(changes).select(events.columns)
