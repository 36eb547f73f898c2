"""The ingest step: raw logs of a range of days to events, quarantine and excluded_events.

Which valid events are used: one copy of each, on time, and within the cap per user and day.
"""

import functools
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from etl.erasure.erased_users import mark_erased_events
from etl.errors import UserError
from etl.ingest.arrival import file_states_by_day, record_ingested_files, with_attribute_files
from etl.ingest.copies import (
    copy_facts,
    copy_order,
    deduplication_key,
    is_dropped_copy,
    is_late,
    may_have_copies,
)
from etl.ingest.corrupt_files import find_corrupt_files
from etl.ingest.file_discovery import RawSelection
from etl.ingest.named_events import lookup_days, with_named_fields
from etl.ingest.normalize import read_logs
from etl.ingest.quarantine import (
    check_bad_record_rate,
    check_declared_columns,
    count_record_groups,
    landing_day_predicate,
    records_by_day,
    write_quarantine,
)
from etl.ingest.readers import UnreadableFileError, translate_read_errors, with_line_numbers
from etl.spec.model import DataSpec
from etl.spec.units import DayRange, date_range
from etl.tables import schemas, spark_io
from etl.tables.day_order import reopen_days
from etl.tables.lake import Lake, arrow_schema
from etl.tables.schemas import NO_DAY


def ingest(
    lake: Lake, raw: str, days: DayRange, *, allow_empty_days: bool = False
) -> dict[str, int]:
    """Replace a range of days of `events`, `quarantine`, `excluded_events` and `ingest_metrics`.

    Files that cannot be read to their end are read as far as possible: after the first of them has
    been met, all are found, and the logs are read again. All checks precede the first write.

    Returns:
        The totals of the new rows of `ingest_metrics`.

    Raises:
        UserError: If files are missing, a column that the spec names has no values, a day has too
            many bad records or, unless `allow_empty_days`, no events, or the days before these have
            not been ingested.
    """
    _check_no_gap(lake, days)
    file_states = file_states_by_day(lake.spec.sources, raw, days)
    if lake.spec.ingest_uses_item_attributes:
        file_states = with_attribute_files(lake.root, file_states)
    corrupt_files: set[str] = set()
    while True:
        try:
            with translate_read_errors():
                selection = RawSelection(raw, days, corrupt_files, allow_empty_days)
                totals = _ingest_once(lake, selection)
            record_ingested_files(lake.root, file_states)
            return totals
        except UnreadableFileError as error:
            if error.uri in corrupt_files:
                raise
            found = {error.uri}
            if not corrupt_files:  # look for all others, instead of reading the days once for each
                sources = lake.spec.log_sources.values()
                found |= {*find_corrupt_files(sources, RawSelection(raw, days))}
            for uri in sorted(found):
                logging.warning("%s; its readable part is ingested", UnreadableFileError(uri))
            corrupt_files |= found


def _check_no_gap(lake: Lake, days: DayRange) -> None:
    """Raise UserError if the day before these, or any later day, is in the wrong state.

    Days before must have been ingested, because duplicates are looked up in them and histories grow
    day by day; later days must not, because they were built from these.
    """
    check_no_later_days(lake, days)
    latest = lake.last_ingested_day()
    if latest and latest + timedelta(days=1) < days[0]:
        first, last = latest + timedelta(days=1), days[0] - timedelta(days=1)
        raise UserError(f"{first} to {last} have not been ingested; ingest them before {days[0]}")


def check_no_later_days(lake: Lake, days: DayRange) -> None:
    """Raise UserError if days after these have been ingested: they were built from these."""
    latest = lake.last_ingested_day()
    if latest and days[1] < latest:
        raise UserError(
            f"{latest} has been ingested already and depends on {days[0]} to {days[1]}: run all "
            f"days up to it, --days {days[0]}:{latest}, in this step and those after it"
        )


def _ingest_once(lake: Lake, selection: RawSelection) -> dict[str, int]:
    spec = lake.spec
    logged_records = read_logs(spec, selection)
    with (
        spark_io.cached(logged_records) as records,
        with_named_fields(
            lake, records, selection.days[0], lookup_days(spec, selection.days)
        ) as all_records,
    ):
        return _ingest_records(lake, selection, all_records)


def _ingest_records(lake: Lake, selection: RawSelection, all_records: DataFrame) -> dict[str, int]:
    """Write the tables from normalized records, among which are records of other days."""
    spec, days = lake.spec, selection.days
    all_records = mark_erased_events(lake, all_records)
    is_of_days = F.col("day").between(F.lit(days[0]), F.lit(days[1])) | F.col("day").isNull()
    is_counted = is_of_days & F.col("reasons").isNotNull()  # null: erased or skipped
    records = all_records.filter(is_counted)
    groups = count_record_groups(spec, records)
    check_bad_record_rate(spec, groups, selection)
    check_declared_columns(spec, groups, selection)
    is_invalid = F.col("reasons") != ""
    valid, invalid = records.filter(~is_invalid), records.filter(is_invalid)
    records_read = dict.fromkeys(date_range(*days), 0)
    records_read |= {day or NO_DAY: n for day, n in records_by_day(groups).items()}
    with split_events(lake, valid, days) as event_split:
        metrics = compute_ingest_metrics(records_read, event_split, invalid)
        # Line numbers count all records of a file, including those of other days.
        numbered = with_line_numbers(all_records).filter(is_counted & is_invalid)
        write_quarantine(lake, spec.log_sources, numbered, days)
        write_events(lake, event_split, days)
    return write_ingest_metrics(lake, metrics, days)


@dataclass(frozen=True)
class EventSplit:
    """Valid events, split into used and excluded ones.

    `deduplicated` are the events on time without copies. `kept` and `excluded` partition the
    deduplicated and the late events. `input_versions` are the versions of the tables in which
    copies were looked up.
    """

    on_time: DataFrame
    deduplicated: DataFrame
    kept: DataFrame
    excluded: DataFrame
    input_versions: Mapping[str, int]


@contextmanager
def split_events(lake: Lake, valid_events: DataFrame, days: DayRange) -> Iterator[EventSplit]:
    """Split the valid events of a range of days; the result is cached in the context."""
    spec = lake.spec
    on_time, late = valid_events.filter(~is_late(spec)), valid_events.filter(is_late(spec))
    deduplicated, input_versions = deduplicate_events(lake, on_time, days)
    with spark_io.cached(deduplicated) as deduplicated:
        kept, excluded = exclude_events(spec, deduplicated, late)
        kept = kept.withColumn("bucket", spark_io.user_bucket(F.col("user_id"), spec.buckets))
        yield EventSplit(on_time, deduplicated, kept, excluded, input_versions)


def write_events(lake: Lake, event_split: EventSplit, days: DayRange) -> None:
    """Replace a range of days of `excluded_events` and `events`; later steps have to follow."""
    reopen_days(lake.spec, lake.root, days[0])
    where = spark_io.day_range_predicate(*days)
    spark_io.replace_partitions(
        lake, schemas.excluded_events(lake.spec), event_split.excluded, where, {}
    )
    spark_io.replace_partitions(
        lake, schemas.events(lake.spec), event_split.kept, where, event_split.input_versions
    )


def compute_ingest_metrics(
    records_read: Mapping[date, int], event_split: EventSplit, quarantined: DataFrame
) -> list[dict[str, Any]]:
    """Rows of `ingest_metrics`; raises AssertionError if a record is not accounted for."""
    counts = _count_rows_by_day(
        {
            "on_time": event_split.on_time,
            "deduplicated": event_split.deduplicated,
            "kept": event_split.kept,
            "excluded": event_split.excluded,
            "quarantined": quarantined,
        }
    )
    metrics = []
    for day, read in records_read.items():
        on_day = {name: by_day.get(day, 0) for name, by_day in counts.items()}
        row = {name: on_day[name] for name in ("kept", "quarantined")}
        row["duplicates"] = on_day["on_time"] - on_day["deduplicated"]
        row["excluded"] = on_day["excluded"]
        assert read == sum(row.values()), f"{day}: {read} records were read, {row} accounted for"
        metrics.append({"day": day, "read": read, **row})
    return metrics


def count_rows_by_day(rows: DataFrame) -> dict[date, int]:
    """Rows of each landing day; those without one count under `NO_DAY`."""
    return _count_rows_by_day({"rows": rows})["rows"]


def _count_rows_by_day(frames: Mapping[str, DataFrame]) -> dict[str, dict[date, int]]:
    """Rows by landing day of several frames, counted in one Spark job."""
    day = F.coalesce("day", F.lit(NO_DAY)).alias("day")
    named = [rows.select(F.lit(name).alias("name"), day) for name, rows in frames.items()]
    union = functools.reduce(DataFrame.unionByName, named)
    counts: dict[str, dict[date, int]] = {name: {} for name in frames}
    for row in union.groupBy("name", "day").count().collect():
        counts[row["name"]][row["day"]] = row["count"]
    return counts


def count_stored_records(lake: Lake) -> dict[str, Counter[date]]:
    """Records in the tables by landing day, under the names of the columns of `ingest_metrics`."""
    quarantined = Counter[date]()
    for log in lake.spec.log_sources:
        quarantined.update(lake.rows_by_day("quarantine", log=log))
    return {
        "kept": Counter(lake.rows_by_day("events")),
        "excluded": Counter(lake.rows_by_day("excluded_events")),
        "quarantined": quarantined,
    }


def write_ingest_metrics(lake: Lake, rows: list[dict[str, Any]], days: DayRange) -> dict[str, int]:
    """Replace a range of days of `ingest_metrics`; returns the totals of each column."""
    schema = schemas.ingest_metrics(lake.spec)
    table = pa.Table.from_pylist(rows, arrow_schema(schema))
    frame = SparkSession.active().createDataFrame(table, schema.ddl)
    spark_io.replace_partitions(lake, schema, frame, landing_day_predicate(days), {})
    return {name: sum(row[name] for row in rows) for name in schema.columns if name != "day"}


LATE_REASON = "too late"
PARTS_OF_CAPPED_USER = 64  # each of a user and day above the cap


def deduplicate_events(
    lake: Lake, events: DataFrame, days: DayRange
) -> tuple[DataFrame, dict[str, int]]:
    """The first copy of each event, unless an earlier day has one; and the table versions read.

    Copies share an event ID within a log (across logs with `shared_event_ids`); impressions are
    copies if they share an impression ID.
    """
    spec, key, versions = lake.spec, deduplication_key(lake.spec).alias("deduplication_key"), {}
    rows = events.select("*", key, F.lit(True).alias("is_new"))
    for schema in (schemas.events(spec), schemas.excluded_events(spec)):
        if lake.exists(schema.name):
            versions[schema.name] = lake.version(schema.name)
            stored = spark_io.read_table(lake, schema, versions[schema.name])
            stored = stored.filter(may_have_copies(spec, days[0]))
            stored = stored.select(key, "day", "event_ts", F.lit(False).alias("is_new"))
            rows = rows.unionByName(stored, allowMissingColumns=True)
    in_order = Window.partitionBy("deduplication_key").orderBy(*copy_order(spec))
    is_later_on_day = F.col("is_new") & (F.lag("day").over(in_order) == F.col("day"))
    rows = rows.withColumn("is_later_on_day", F.coalesce(is_later_on_day, F.lit(False)))
    facts = copy_facts(spec, F.col("event_ts"), F.col("is_new"))
    rows = rows.filter("NOT is_later_on_day").withColumn("facts", facts)
    before = in_order.rowsBetween(Window.unboundedPreceding, -1)
    earlier = F.collect_list("facts").over(before)
    rows = rows.withColumn("is_dropped", is_dropped_copy(F.col("facts"), earlier))
    return rows.filter("is_new AND NOT is_dropped").select(events.columns), versions


def exclude_events(
    spec: DataSpec, on_time: DataFrame, late: DataFrame
) -> tuple[DataFrame, DataFrame]:
    """Events to use, and events to exclude with a `reason`: late ones and those above the cap.

    Of a user with more than `max_events_per_user_day`, the first of the day to become visible are
    used, so that later events do not change earlier features. Only the events of such users are
    sorted, first in parts: no task sorts all events of one user.
    """
    cap = spec.max_events_per_user_day
    excluded = late.withColumn("reason", F.lit(LATE_REASON))
    per_user = on_time.groupBy("day", "user_id").count()
    capped_users = per_user.filter(F.col("count") > cap).select("day", "user_id")
    if capped_users.isEmpty():
        return on_time, excluded
    of_capped = on_time.join(capped_users, ["day", "user_id"], "left_semi")
    of_others = on_time.join(capped_users, ["day", "user_id"], "left_anti")
    part = F.pmod(F.xxhash64("event_id"), F.lit(PARTS_OF_CAPPED_USER))
    first_of_part, rest_of_part = _split_at_rank(of_capped, cap, "day", "user_id", part)
    first, rest = _split_at_rank(first_of_part, cap, "day", "user_id")
    reason = F.lit(f"more than {cap:,} events of a user and day")
    above_cap = rest_of_part.unionByName(rest).withColumn("reason", reason)
    return of_others.unionByName(first), excluded.unionByName(above_cap)


def _split_at_rank(
    events: DataFrame, count: int, *group: str | Column
) -> tuple[DataFrame, DataFrame]:
    """The first events of each group to become visible, up to a count, and all others."""
    order = Window.partitionBy(*group).orderBy("visible_ts", "event_ts", "event_id")
    ranked = events.withColumn("rank", F.row_number().over(order))
    is_first = F.col("rank") <= count
    return ranked.filter(is_first).drop("rank"), ranked.filter(~is_first).drop("rank")
