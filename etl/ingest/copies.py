"""Which events are copies of one another, and which copies ingest can know."""

from datetime import date, timedelta

from pyspark.sql import Column
from pyspark.sql import functions as F

from etl.event_time import day_start_sql
from etl.spec.model import DataSpec
from etl.spec.units import MICROS
from etl.tables import schemas


def is_late(spec: DataSpec) -> Column:
    """Whether an event occurred more than `allowed_lateness` before its landing day began."""
    return F.col("event_ts") < _on_time_since(spec)


def _on_time_since(spec: DataSpec) -> Column:
    """The earliest time (µs) at which an event on time of a `day` occurred."""
    return F.expr(f"({day_start_sql(spec)} - {spec.allowed_lateness}) * {MICROS['s']}")


def deduplication_key(spec: DataSpec) -> Column:
    """What copies of an event have in common."""
    is_impression = F.col("type") == spec.event_codes[spec.impression_type]
    own = F.col("event_id") if spec.shared_event_ids else F.concat_ws("\x1f", "log", "event_id")
    return F.when(is_impression, F.concat(F.lit("shown "), "impression_id")).otherwise(own)


def copy_order(spec: DataSpec) -> tuple[str | Column, ...]:
    """The order of the copies of an event: by the day and time at which they landed."""
    tie_breaker = F.xxhash64(*[F.col(name) for name in event_columns(spec)])
    return "day", "ingest_ts", tie_breaker.alias("tie_breaker")


def event_columns(spec: DataSpec) -> list[str]:
    """The columns that valid events have in any table."""
    return [name for name in schemas.excluded_events(spec).columns if name != "reason"]


def days_with_copies(spec: DataSpec) -> int:
    """Days before a landing day on which the first copies of its events on time may have landed.

    A copy may be on time if its event occurred at most `allowed_lateness` before its day. The first
    one may have landed as long before its event, as an outcome in the record of its impression.
    """
    # Two days more: that of the event, and one for days of less than 24 hours.
    return 2 * spec.allowed_lateness_days + 2


def copy_facts(spec: DataSpec, event_ts: Column, may_be_dropped: Column) -> Column:
    """What decides whether an event of a `day` is dropped as a copy, or is the first of others.

    `event_ts` is when it occurred, in µs. It `may_be_dropped` if it is on time and not stored yet.
    """
    return F.struct(
        "day",
        event_ts.alias("event_ts"),
        _on_time_since(spec).alias("occurred_since"),
        F.date_sub("day", days_with_copies(spec)).alias("first_day"),
        may_be_dropped.alias("may_be_dropped"),
    )


def is_dropped_copy(facts: Column, earlier: Column) -> Column:
    """Whether an event is dropped, because one of its copies that are kept may have copies.

    `facts` are those of the event, `earlier` an array of those of its copies that landed on earlier
    days, in order of these. The rule is that of `may_have_copies` for each landing day, so that it
    does not depend on which days are ingested together.
    """

    def is_copy(row: Column, kept: Column) -> Column:
        has_first = F.exists(
            kept,
            lambda first: (
                (first["event_ts"] >= row["occurred_since"]) & (first["day"] >= row["first_day"])
            ),
        )
        return row["may_be_dropped"] & has_first

    def keep(kept: Column, row: Column) -> Column:
        return F.when(is_copy(row, kept), kept).otherwise(F.concat(kept, F.array(row)))

    nothing = F.filter(earlier, lambda _: F.lit(False))
    return is_copy(facts, F.aggregate(earlier, nothing, keep))


def may_have_copies(spec: DataSpec, first_day: date) -> Column:
    """Whether a stored event of an earlier day may have a copy that is on time on `first_day`."""
    first, last = first_day - timedelta(days=days_with_copies(spec)), first_day - timedelta(days=1)
    earliest_second = spec.day_start(first_day) - spec.allowed_lateness
    # Delta skips files by the first of the two: no event is visible before it occurs.
    is_recent = (F.col("visible_ts") >= earliest_second) & (
        F.col("event_ts") >= earliest_second * MICROS["s"]
    )
    return F.col("day").between(F.lit(first), F.lit(last)) & is_recent
