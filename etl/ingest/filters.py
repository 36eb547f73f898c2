"""Which valid events are used: one copy of each, on time, and within the cap per user and day."""

from datetime import date, timedelta

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from etl.event_time import day_start_sql
from etl.spec.model import DataSpec
from etl.spec.units import MICROS
from etl.tables import schemas, spark_io
from etl.tables.lake import Lake

LATE_REASON = "too late"


def is_late(spec: DataSpec) -> Column:
    """Whether an event occurred more than `allowed_lateness` before its landing day began."""
    return F.expr(f"event_ts < ({day_start_sql(spec)} - {spec.allowed_lateness}) * {MICROS['s']}")


def deduplicate_events(
    lake: Lake, events: DataFrame, days: tuple[date, date]
) -> tuple[DataFrame, dict[str, int]]:
    """The first copy of each event, unless an earlier day has one; and the table versions read.

    Copies share an event ID within a log (across logs with `shared_event_ids`); impressions are
    copies if they share an impression ID. Copies that landed up to `allowed_lateness` before `days`
    are looked up in the tables; those of older events are late and were removed before.
    """
    spec = lake.spec
    events = events.withColumn("deduplication_key", _deduplication_key(spec))
    columns = [name for name in schemas.excluded_events(spec).columns if name != "reason"]
    tie_breaker = F.xxhash64(*[F.col(name) for name in columns])
    order = Window.partitionBy("deduplication_key").orderBy("day", "ingest_ts", tie_breaker)
    first = events.withColumn("copy", F.row_number().over(order)).filter("copy = 1").drop("copy")
    last_day_before = days[0] - timedelta(days=1)
    first_day_before = days[0] - timedelta(days=spec.allowed_lateness_days + 1)
    versions = {}
    for schema in (schemas.events(spec), schemas.excluded_events(spec)):
        if lake.exists(schema.name):
            versions[schema.name] = lake.version(schema.name)
            rows = spark_io.read_table(lake, schema, versions[schema.name])
            earlier = rows.filter(spark_io.day_range_predicate(first_day_before, last_day_before))
            earlier = earlier.select(_deduplication_key(spec).alias("deduplication_key"))
            first = first.join(earlier, "deduplication_key", "left_anti")
    return first.drop("deduplication_key"), versions


def _deduplication_key(spec: DataSpec) -> Column:
    is_impression = F.col("type") == spec.event_codes[spec.impression_type]
    own = F.col("event_id") if spec.shared_event_ids else F.concat_ws("\x1f", "log", "event_id")
    return F.when(is_impression, F.concat(F.lit("shown "), "impression_id")).otherwise(own)


def exclude_events(
    spec: DataSpec, on_time: DataFrame, late: DataFrame
) -> tuple[DataFrame, DataFrame]:
    """Events to use, and events to exclude with a `reason`: late ones and those above the cap.

    Of a user with more than `max_events_per_user_day`, the first of the day to become visible are
    used, so that later events do not change earlier features. Only the events of such users are
    sorted.
    """
    cap = spec.max_events_per_user_day
    excluded = late.withColumn("reason", F.lit(LATE_REASON))
    per_user = on_time.groupBy("day", "user_id").count()
    capped_users = per_user.filter(F.col("count") > cap).select("day", "user_id")
    if capped_users.isEmpty():
        return on_time, excluded
    order = Window.partitionBy("day", "user_id").orderBy("visible_ts", "event_ts", "event_id")
    of_capped = on_time.join(capped_users, ["day", "user_id"], "left_semi")
    of_others = on_time.join(capped_users, ["day", "user_id"], "left_anti")
    ranked = of_capped.withColumn("rank_in_day", F.row_number().over(order))
    is_above_cap = F.col("rank_in_day") > cap
    kept = of_others.unionByName(ranked.filter(~is_above_cap).drop("rank_in_day"))
    reason = F.lit(f"more than {cap:,} events of a user and day")
    above_cap = ranked.filter(is_above_cap).drop("rank_in_day").withColumn("reason", reason)
    return kept, excluded.unionByName(above_cap)
