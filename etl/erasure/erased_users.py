"""The table `erased_users`: raw records of erased users are left out by every later run."""

from datetime import date

import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from etl.erasure.hashes import create_salt, read_salt
from etl.event_time import day_start_sql
from etl.ingest.readers import PAYLOAD, RECORD_LOCATION, SOURCE_FILE
from etl.spec.units import MICROS
from etl.tables import spark_io, user_schemas
from etl.tables.lake import Lake

ID_SEPARATORS = r"""[\s"',:;{}\[\]()|\\]+"""
URL_SEPARATORS = r"""[\s"',:;{}\[\]()|\\=&/?#<>]+"""  # an id may contain some of these itself


def record_erased_users(lake: Lake, users: DataFrame, until_ts: int, day: date) -> None:
    """Add users (`user_id`) whose data until a time (µs) is erased on a day."""
    schema = user_schemas.erased_users(lake.spec)
    create_salt(lake)
    rows = users.select(salted_hash(lake, F.col("user_id")).alias("id_hash"))
    rows = rows.withColumns({"until_ts": F.lit(until_ts), "day": F.lit(day)})
    versions = {schema.name: lake.version(schema.name)}
    stored = spark_io.read_table(lake, schema, versions[schema.name])
    rows = rows.unionByName(stored.filter(F.col("day") == F.lit(day)))
    rows = rows.groupBy("id_hash", "day").agg(F.max("until_ts").alias("until_ts"))
    spark_io.replace_partitions(lake, schema, rows, f"day = '{day}'", versions)


def salted_hash(lake: Lake, user_id: Column) -> Column:
    """The salted hash of a user's id; `hash_user` is the same in Python."""
    return F.sha2(F.concat(F.lit(read_salt(lake)), user_id), 256)


def erased_until(lake: Lake, before: date | None, now: int) -> int:
    """The last second that the erasure covers.

    With `before`, it is the last one before that day, and events that became visible later are
    kept. Otherwise it is `now`, and covers what occurred or was logged until then, whether or not
    it has been ingested. If the lake has data that became visible later than the slowest log
    allows, such as simulated logs of the future, it is the last second at which any did.
    """
    if before is not None:
        return lake.spec.day_start(before) - 1
    visible = [
        pc.max(lake.add_actions(name)["max.visible_ts"]).as_py()
        for name in ("events", "excluded_events")
        if lake.exists(name)
    ]
    last_visible = max((int(second) for second in visible if second is not None), default=now)
    slowest_source = max(log.delay for log in lake.spec.log_sources.values())
    return last_visible if last_visible > now + slowest_source else now


def mark_erased(lake: Lake, rows: DataFrame) -> DataFrame:
    """Raw records with null `reasons` where their user was erased: they are neither valid nor bad.

    `rows` have `user_id`, `reasons`, `day`, and their payload and location. A record is known from
    the time at which its day began. One whose user could not be read belongs to the users whose ids
    are words of its payload.
    """
    erased = _last_erasures(lake)
    if erased is None:
        return rows
    joined = _with_erasures(lake, rows, erased, RECORD_LOCATION)
    return _without_reasons(joined, _day_start(lake) <= F.col("erased_until"), rows)


def mark_erased_events(
    lake: Lake, rows: DataFrame, location_column: str = RECORD_LOCATION
) -> DataFrame:
    """`mark_erased` for normalized records of logs, of which a valid one has `visible_ts`.

    A valid event is erased by the rule of `without_erased`, a bad record also by that of its day.
    """
    erased = _last_erasures(lake)
    if erased is None:
        return rows
    joined = _with_erasures(lake, rows, erased, location_column)
    of_day = _day_start(lake) <= F.col("erased_until")
    is_erased_record = of_day | F.coalesce(_is_erased_event(), F.lit(False))
    is_erased = F.when(F.col("reasons") == "", _is_erased_event()).otherwise(is_erased_record)
    return _without_reasons(joined, is_erased, rows)


def without_erased(lake: Lake, events: DataFrame) -> DataFrame:
    """Valid events that no erasure of their user covers.

    An erasure covers what was visible until its time and, if it is of all data, all that occurred
    or was logged until then: a copy of an erased event that is delivered again later is visible
    later, and nothing is left of which it is a duplicate.
    """
    erased = _last_erasures(lake)
    if erased is None:
        return events
    rows = events.withColumn("id_hash", salted_hash(lake, F.col("user_id")))
    rows = rows.join(erased, "id_hash", "left")
    return rows.filter(~F.coalesce(_is_erased_event(), F.lit(False))).select(events.columns)


def _last_erasures(lake: Lake) -> DataFrame | None:
    """Erasures by `id_hash`: `erased_until` (µs), and `all_erased_until` (µs) of those of all data.

    None if there is none. An erasure of all data reaches beyond the start of its own day.
    """
    schema = user_schemas.erased_users(lake.spec)
    if not lake.exists(schema.name):
        return None
    stored, day_start = spark_io.read_table(lake, schema), _day_start(lake)
    of_all_data = F.when(F.col("until_ts") >= day_start, F.col("until_ts"))
    return stored.groupBy("id_hash").agg(
        F.max("until_ts").alias("erased_until"), F.max(of_all_data).alias("all_erased_until")
    )


def _is_erased_event() -> Column:
    """Whether a joined erasure covers a valid event; null without one."""
    was_visible = F.col("visible_ts") * MICROS["s"] <= F.col("erased_until")
    had_occurred = F.least("event_ts", "ingest_ts") <= F.col("all_erased_until")
    return was_visible | F.coalesce(had_occurred, F.lit(False))


def _day_start(lake: Lake) -> Column:
    """The time (µs) at which the day of a row began."""
    return F.expr(f"{day_start_sql(lake.spec)} * {MICROS['s']}")


def _with_erasures(
    lake: Lake, rows: DataFrame, erased: DataFrame, location_column: str
) -> DataFrame:
    """Raw records with the last erasures of their user, or of users whom they mention."""
    location = [SOURCE_FILE, location_column]
    unreadable = rows.filter(F.col("user_id").isNull() & F.col(PAYLOAD).isNotNull())
    words = unreadable.select(*location, F.explode(payload_words(F.col(PAYLOAD))).alias("word"))
    mentions = words.withColumn("id_hash", salted_hash(lake, F.col("word")))
    mentions = mentions.join(erased, "id_hash")
    mentions = mentions.groupBy(*location).agg(F.max("erased_until").alias("mentioned_until"))
    rows = rows.withColumn("id_hash", salted_hash(lake, F.col("user_id")))
    rows = rows.join(erased, "id_hash", "left").join(mentions, location, "left")
    return rows.withColumn("erased_until", F.coalesce("erased_until", "mentioned_until"))


def _without_reasons(joined: DataFrame, is_erased: Column, rows: DataFrame) -> DataFrame:
    """The columns of `rows`, with null `reasons` where an erasure covers the record.

    A record without a day is covered: nothing shows that it is later than the erasure.
    """
    is_covered = F.col("erased_until").isNotNull() & F.coalesce(is_erased, F.lit(True))
    return joined.withColumn("reasons", F.when(~is_covered, F.col("reasons"))).select(rows.columns)


def payload_words(payload: Column) -> Column:
    """The parts of a record that may be an id: between quotes, separators, and those of URLs."""
    quoted = F.regexp_extract_all(payload, F.lit(r'"([^"]*)"'), F.lit(1))
    words, in_urls = F.split(payload, ID_SEPARATORS), F.split(payload, URL_SEPARATORS)
    return F.array_union(F.array_union(quoted, words), in_urls)
