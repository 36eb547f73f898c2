"""Reprocessing of quarantined records after the spec or the code has been corrected."""

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from etl.erasure.erased_users import mark_erased_events
from etl.errors import UserError
from etl.ingest.log_columns import logged_columns
from etl.ingest.named_events import lookup_days, read_valid_events, with_named_fields
from etl.ingest.normalize import REASON_SEPARATOR, normalize_events
from etl.ingest.quarantine import landing_day_predicate, write_quarantine
from etl.ingest.readers import PATH_DAY, PAYLOAD, READ_ERROR, SOURCE_FILE, parse_quarantined
from etl.ingest.run import (
    check_no_later_days,
    count_rows_by_day,
    count_stored_records,
    split_events,
    write_events,
    write_ingest_metrics,
)
from etl.spec.model import DataSpec
from etl.spec.sources import ImpressionLogSource
from etl.spec.units import DayRange
from etl.tables import schemas, spark_io, step_state
from etl.tables.arrow import snapshot
from etl.tables.lake import Lake
from etl.tables.schemas import NO_DAY


def reprocess_quarantine(lake: Lake, days: DayRange) -> dict[str, int]:
    """Move the quarantined records of a range of days that are valid now to the events.

    Records keep their landing day, so the tables that are built from these days have to be rebuilt:
    the ingest step gets a new run id. Days before the first record that is valid now are neither
    read nor rewritten. Records that are still invalid get their new reasons. Unreadable files stay
    in quarantine: replace them and ingest their day again. Records are removed from quarantine only
    after they have been written as events, so that an interrupted run can be repeated.

    Raises:
        UserError: If nothing is quarantined on these days, or later days have been ingested, which
            may hold copies of the reprocessed records.
    """
    check_no_later_days(lake, days)
    quarantine = spark_io.read_table(lake, schemas.quarantine(lake.spec))
    quarantined = quarantine.filter(landing_day_predicate(days)).filter(
        F.col("log").isin(list(lake.spec.log_sources))
    )
    records = _normalize_quarantined(lake.spec, quarantined, days)
    records = _without_stored_events(lake, records, days)
    with _without_nested_pruning(), spark_io.cached(records) as records:
        # Events that name an unknown one are still valid here: the day may be earlier than needed.
        first_day = _first_valid_day(records) or days[1]
        stored_days = lookup_days(lake.spec, (first_day, days[1]))[0], days[1]
        with with_named_fields(lake, records, first_day, stored_days) as named:
            # An erasure may have missed a record whose user could not be read.
            completed = mark_erased_events(lake, named, "line").filter("reasons IS NOT NULL")
            return _release_records(lake, days, quarantined, completed)


@contextmanager
def _without_nested_pruning() -> Iterator[None]:
    """Read structs with all fields in the context.

    Spark 4.2 fails where it prunes those of a record that was parsed from its payload and exploded
    into its outcomes: it also prunes a column that is needed.
    """
    settings, name = SparkSession.active().conf, "spark.sql.optimizer.nestedSchemaPruning.enabled"
    before = str(settings.get(name))
    settings.set(name, "false")
    try:
        yield
    finally:
        settings.set(name, before)


def _first_valid_day(records: DataFrame) -> date | None:
    """The first landing day of the valid records; None if there are none."""
    row = records.filter("reasons = ''").agg(F.min("day")).first()
    first: date | None = row[0] if row else None
    return first


def _release_records(
    lake: Lake, days: DayRange, quarantined: DataFrame, records: DataFrame
) -> dict[str, int]:
    """Write the tables from the quarantined records as they are normalized now.

    Events before the first day with a valid record stay as they are.
    """
    before, after = count_rows_by_day(quarantined), count_rows_by_day(records)
    valid, invalid = records.filter("reasons = ''"), records.filter("reasons != ''")
    first_day = _first_valid_day(records)
    if before:  # an interrupted run has changed tables, too, and the next may find nothing to do
        _renew_ingest(lake)
    if first_day:
        _add_events(lake, valid, (first_day, days[1]))
    write_quarantine(lake, lake.spec.log_sources, invalid, days)
    write_ingest_metrics(lake, _recompute_metrics(lake, days, before, after), days)
    if not before:
        raise UserError(f"no record of {days[0]} to {days[1]} is in quarantine in {lake.root}")
    _renew_ingest(lake)  # a step may have read tables between the writes
    return {"released": valid.count(), "still quarantined": invalid.count()}


def _renew_ingest(lake: Lake) -> None:
    """Let the steps that read what ingest wrote run again, also those of a refresh."""
    for name in ("ingest", f"{step_state.REFRESH_PREFIX}ingest"):
        step_state.renew_run_id(lake.root, name)


def _add_events(lake: Lake, valid: DataFrame, days: DayRange) -> None:
    """Write the events of some days again, with valid records in addition to the stored ones."""
    stored = read_valid_events(lake, days)
    events = stored.unionByName(valid.select(stored.columns))
    with split_events(lake, events, days) as event_split:
        write_events(lake, event_split, days)


def _recompute_metrics(
    lake: Lake, days: DayRange, before: Mapping[date, int], after: Mapping[date, int]
) -> list[dict[str, Any]]:
    """Rows of `ingest_metrics` that agree with the tables as they are now.

    `before` and `after` count the reprocessed records by their old and new landing days. After an
    interrupted run the tables may hold more records than these counts explain.
    """
    rows, stored_records = [], count_stored_records(lake)
    for row in snapshot(lake, schemas.ingest_metrics(lake.spec)).read().to_pylist():
        day = row["day"]
        if not (days[0] <= day <= days[1] or day == NO_DAY):
            continue
        counts = {name: by_day[day] for name, by_day in stored_records.items()}
        stored = sum(counts.values())
        read = row["read"] - before.get(day, 0) + after.get(day, 0)
        read = max(read, stored + row["duplicates"])
        rows.append({"day": day, "read": read, **counts, "duplicates": read - stored})
    return rows


def _without_stored_events(lake: Lake, records: DataFrame, days: DayRange) -> DataFrame:
    """Records without the valid events of wide logs that ingest has stored.

    Quarantine keeps the whole record of an invalid outcome, with the impression and others.
    """
    logs = lake.spec.impression_logs
    if not logs:
        return records
    key = ["log", "event_id", "day"]
    stored = read_valid_events(lake, days).filter(F.col("log").isin(*logs)).select(key)
    stored = stored.withColumn("is_stored", F.lit(True))
    records = records.join(stored, key, "left")
    return records.filter("is_stored IS NULL OR reasons != ''").drop("is_stored")


def _normalize_quarantined(spec: DataSpec, quarantined: DataFrame, days: DayRange) -> DataFrame:
    """Quarantined records as `normalize_events` returns them; whole files keep their reasons.

    Records that `where` of their source skips now are left out.
    """
    by_log = []
    for name, log in spec.log_sources.items():
        rows = quarantined.filter(F.col("log") == name)
        if isinstance(log, ImpressionLogSource):  # each of its invalid outcomes has the record
            rows = rows.dropDuplicates([SOURCE_FILE, "line"])
        rows = rows.withColumn(PATH_DAY, F.nullif("day", F.lit(NO_DAY)))
        rows = parse_quarantined(log, rows.drop("day", "log"), logged_columns(spec, log))
        file_reasons = F.when(F.col(PAYLOAD).isNull(), F.concat_ws(REASON_SEPARATOR, "reasons"))
        rows = rows.withColumn(READ_ERROR, F.coalesce(file_reasons, READ_ERROR)).drop("reasons")
        by_log.append(normalize_events(spec, name, rows, "line"))
    records = functools.reduce(DataFrame.unionByName, by_log).filter("reasons IS NOT NULL")
    day, reasons = F.coalesce("day", F.lit(NO_DAY)), F.col("reasons")
    is_of_other_day = (reasons == "") & ~F.col("day").between(*map(F.lit, days))
    other_day_reason = F.lit("of a day that was not reprocessed")
    return records.withColumns(
        {
            "day": F.when(is_of_other_day, F.lit(NO_DAY)).otherwise(day),
            "reasons": F.when(is_of_other_day, other_day_reason).otherwise(reasons),
        }
    )
