"""Users, items, surfaces and impressions of events that belong to an earlier event.

Examples are off-site conversions, which only have the id of an impression or of a click, or the
user and the advertiser of a click. What an event belongs to must have landed on the day of the
event or before it, so that each day depends on days up to it alone.
"""

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import date, timedelta

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from etl.attribute_versions import with_item_key
from etl.erasure.erased_users import without_erased
from etl.errors import UserError
from etl.event_time import day_end_sql
from etl.ingest.copies import (
    copy_facts,
    copy_order,
    days_with_copies,
    deduplication_key,
    event_columns,
    is_dropped_copy,
    is_late,
)
from etl.ingest.normalize import NAMED_FIELDS
from etl.ingest.readers import PAYLOAD
from etl.spec.model import DataSpec
from etl.spec.sources import EventLogSource
from etl.spec.units import MICROS, DayRange
from etl.tables import schemas, spark_io
from etl.tables.lake import Lake

UNKNOWN_EVENT = "names no known event"
NO_TOUCH = "follows no known touch"
FIELDS = tuple(NAMED_FIELDS.values())


@contextmanager
def with_named_fields(
    lake: Lake, records: DataFrame, first_day: date, stored_days: DayRange
) -> Iterator[DataFrame]:
    """Normalized records in which valid events have the fields of the events that they name.

    These are the fields that their log lacks, and the impression of a touch. They are looked up
    among the records from `first_day` on, and in the tables on `stored_days`. Copies that ingest
    drops from `first_day` on do not count, because later runs find them in no table. An event
    becomes visible no earlier than what it belongs to. One without a field is invalid, with the
    reason UNKNOWN_EVENT or NO_TOUCH. Logs that name impressions come first, because others may
    belong to their events. What was looked up is cached in the context.

    Raises:
        UserError: If attributes of items are needed that have not been loaded.
    """
    spec = lake.spec
    logs = [
        (name, log)
        for name, log in spec.log_sources.items()
        if isinstance(log, EventLogSource) and log.names_events
    ]
    with ExitStack() as stack:
        for name, log in sorted(logs, key=lambda item: item[1].touch is not None):
            is_of_log = F.coalesce((F.col("log") == name) & (F.col("reasons") == ""), F.lit(False))
            events = records.filter(is_of_log)
            candidates = _candidate_events(lake, log, records, first_day, stored_days)
            if not log.touch_key:
                candidates = _with_ids_of(log, events, candidates)
            copies = _first_copies_by_day(spec, candidates, first_day)
            if log.touch_key:
                named = _with_last_touch(lake, name, log, events, copies)
            else:
                named = _with_named_event(spec, log, events, copies)
            completed = stack.enter_context(spark_io.cached(_complete(log, named, events.columns)))
            records = records.filter(~is_of_log).unionByName(completed)
        yield records


def lookback_days(spec: DataSpec) -> int:
    """Days before the landing day of an event on which what it belongs to may have landed.

    Outcomes that follow their impression by more than the window of an objective label nothing.
    """
    return spec.label_maturity_days + spec.allowed_lateness_days + 1


def lookup_days(spec: DataSpec, days: DayRange) -> DayRange:
    """The days before some days on which events landed that events of these may belong to.

    First copies of these may have landed earlier still.
    """
    num_days = max(lookback_days(spec), days_with_copies(spec))
    return days[0] - timedelta(days=num_days), days[0] - timedelta(days=1)


def read_valid_events(lake: Lake, days: DayRange) -> DataFrame:
    """The stored valid events of a range of days, used or excluded, without `bucket`."""
    tables = []
    for schema in (schemas.events(lake.spec), schemas.excluded_events(lake.spec)):
        rows = spark_io.read_table(lake, schema, lake.version(schema.name))
        rows = rows.filter(spark_io.day_range_predicate(*days))
        tables.append(rows.select(event_columns(lake.spec)))
    return functools.reduce(DataFrame.unionByName, tables)


def _candidate_events(
    lake: Lake, log: EventLogSource, records: DataFrame, first_day: date, stored_days: DayRange
) -> DataFrame:
    """The valid events of the type that a log names or follows, with all fields.

    They are among normalized records from a day on, and in the tables on some days.
    """
    type_ = lake.spec.event_codes[log.touch or lake.spec.impression_type]
    events = records.filter("reasons = ''").filter(F.col("day") >= F.lit(first_day))
    events = events.dropna(subset=list(FIELDS)).select(event_columns(lake.spec))
    events = without_erased(lake, events)
    if lake.exists("events"):  # which ingest writes last
        events = events.unionByName(read_valid_events(lake, stored_days))
    return events.filter(F.col("type") == type_)


def _with_ids_of(log: EventLogSource, events: DataFrame, candidates: DataFrame) -> DataFrame:
    """The candidates whose id some event of a log has."""
    logged_id, own_id = _id_columns(log)
    named = events.select(F.col(logged_id).alias(own_id)).distinct()
    return candidates.join(named, own_id, "left_semi")


def _id_columns(log: EventLogSource) -> tuple[str, str]:
    """The column with the id that an event names, and that of this id in what is named."""
    if log.columns.touch:
        return "logged_touch_id", "event_id"
    return "logged_impression_id", "impression_id"


def _with_named_event(
    spec: DataSpec, log: EventLogSource, events: DataFrame, copies: DataFrame
) -> DataFrame:
    """Events of a log with `named`, the copy whose id they have; null if it is unknown.

    Of several copies, the first counts that landed in the days that the event may name.
    """
    logged_id, own_id = _id_columns(log)
    copy = F.struct("day", "ingest_ts", "tie_breaker", "impression_id", "visible_ts", *FIELDS)
    copies = copies.select(F.col(own_id).alias(logged_id), copy.alias("copy"))
    copies = copies.groupBy(logged_id).agg(F.sort_array(F.collect_list("copy")).alias("copies"))
    first_day = F.date_sub("day", lookback_days(spec))
    named = F.get(F.filter("copies", lambda c: c["day"].between(first_day, F.col("day"))), F.lit(0))
    return events.join(copies, logged_id, "left").withColumn("named", named)


def _with_last_touch(
    lake: Lake, log_name: str, log: EventLogSource, events: DataFrame, copies: DataFrame
) -> DataFrame:
    """Events of a log with `named`, the latest touch that they follow; null if there is none.

    It has the same user and touch key, and occurred at most `touch_window` before the event. Of
    several copies, the first counts that landed in the days that the event may follow. The
    attribute of its item must have landed by the event's day, and be known by the end of that day.
    """
    spec = lake.spec
    assert log.touch_key and log.touch_window is not None
    if log.touch_key != "item" and not lake.exists("attributes_item"):
        raise UserError(
            f"sources.{log_name}.touch_key: {log.touch_key} is an attribute of items: load the "
            "attributes of these days with `gemline etl attributes` before `gemline etl ingest`"
        )
    touches = _drop_automated_users(spec, copies)
    keyed = with_item_key(lake, touches, log.touch_key)
    keyed = keyed.withColumnRenamed("item_key", "logged_touch_key")
    key = ("user_id", "logged_touch_key")
    keyed = keyed.join(events.select(*key).distinct(), [*key], "left_semi")
    touch = F.struct(
        *("event_ts", "event_id"),
        (-F.unix_date("day")).alias("negative_day"),  # of copies, the first comes last
        *("day", "item_key_since", "item_key_day", "impression_id", *FIELDS),
        F.greatest("visible_ts", "item_key_since").alias("visible_ts"),
    )
    in_order = F.sort_array(F.collect_list("touch")).alias("touches")
    touches = keyed.select(*key, touch.alias("touch")).groupBy(*key).agg(in_order)
    rows = events.join(touches, [*key], "left")
    rows = rows.withColumns(
        {
            "first_touch_ts": F.col("event_ts") - log.touch_window * MICROS["s"],
            "first_touch_day": F.date_sub("day", lookback_days(spec)),
            "day_end": F.expr(day_end_sql(spec)),
        }
    )
    followed = F.filter(
        "touches",
        lambda touch: (
            touch["event_ts"].between(F.col("first_touch_ts"), F.col("event_ts"))
            & touch["day"].between(F.col("first_touch_day"), F.col("day"))
            & (touch["item_key_day"] <= F.col("day"))
            & (touch["item_key_since"] <= F.col("day_end"))
        ),
    )
    return rows.withColumn("named", F.try_element_at(followed, F.lit(-1)))


def _first_copies_by_day(spec: DataSpec, events: DataFrame, first_day: date) -> DataFrame:
    """What identifies and completes an event, of its first copy that landed on each day.

    From `first_day` on, copies are left out that `deduplicate_events` drops. First, each task
    reduces its events to one of a key, day and kind: an id that many share, such as "0", is no load
    for one.
    """
    copy = F.struct(
        *(*copy_order(spec)[1:], "event_ts", "event_id", "impression_id", "visible_ts", *FIELDS)
    )
    keys = {
        "deduplication_key": deduplication_key(spec),
        "is_on_time": (F.col("day") >= F.lit(first_day)) & ~is_late(spec),
    }
    by_kind = events.withColumns(keys).groupBy(*keys, "day")
    of_kind = by_kind.agg(F.min(copy).alias("copy"), F.max("event_ts").alias("last_event_ts"))
    # Of a day, the first event on time is kept; of stored ones, each may be the first of copies.
    event_ts = F.when(F.col("is_on_time"), F.col("copy.event_ts")).otherwise(F.col("last_event_ts"))
    of_kind = of_kind.withColumn("facts", copy_facts(spec, event_ts, F.col("is_on_time")))
    before = Window.partitionBy("deduplication_key").orderBy("day", "copy")
    before = before.rowsBetween(Window.unboundedPreceding, -1)
    is_dropped = is_dropped_copy(F.col("facts"), F.collect_list("facts").over(before))
    kept = of_kind.withColumn("is_dropped", is_dropped).filter("NOT is_dropped")
    first = kept.groupBy("deduplication_key", "day")
    return first.agg(F.min("copy").alias("first")).select("day", "first.*")


def _drop_automated_users(spec: DataSpec, touches: DataFrame) -> DataFrame:
    """Touches without those of users with more than `max_events_per_user_day` of them on a day.

    Placeholders such as "0" are such users: their touches would be gathered in one task.
    """
    counts = touches.groupBy("user_id", "day").count()  # which each task sums before the shuffle
    automated = counts.filter(F.col("count") > spec.max_events_per_user_day)
    return touches.join(automated, ["user_id", "day"], "left_anti")


def _complete(log: EventLogSource, rows: DataFrame, columns: list[str]) -> DataFrame:
    """Events of a log with the fields of what is `named`, or with the reason why they lack them."""
    lacks_fields = F.col("named").isNull() & F.lit(bool(log.fields_of_named))
    reason = NO_TOUCH if log.touch_key else UNKNOWN_EVENT
    changes = {
        "reasons": F.when(lacks_fields, reason).otherwise(""),
        PAYLOAD: F.when(lacks_fields, F.col(PAYLOAD)),
        "visible_ts": F.greatest("visible_ts", "named.visible_ts"),
        "impression_id": F.coalesce("impression_id", "named.impression_id"),
    }
    fields = [NAMED_FIELDS[field] for field in log.fields_of_named]
    changes |= {field: F.col(f"named.{field}") for field in fields}
    return rows.withColumns(changes).select(columns)
