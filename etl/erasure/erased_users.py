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
    """The last second that the erasure covers; records that become visible later are kept.

    With `before`, it is the last one before that day. Otherwise it is `now` plus the largest
    `delay` of the logs, because events that were logged until now become visible up to so much
    later, whether or not they have been ingested.
    """
    if before is not None:
        return lake.spec.day_start(before) - 1
    visible = [
        pc.max(lake.add_actions(name)["max.visible_ts"]).as_py()
        for name in ("events", "excluded_events")
        if lake.exists(name)
    ]
    slowest_source = max(log.delay for log in lake.spec.log_sources.values())
    seconds = (int(second) for second in visible if second is not None)
    return max([now + slowest_source, *seconds])


def mark_erased(lake: Lake, rows: DataFrame, known_ts: Column | None = None) -> DataFrame:
    """Raw records with null `reasons` where their user was erased: they are neither valid nor bad.

    Args:
        lake: The lake.
        rows: Records with `user_id`, `reasons`, `day`, and their payload and location. One whose
            user could not be read belongs to the users whose ids are words of its payload.
        known_ts: The time (µs) from which a valid record was known; by default, and for a bad one,
            that at which its day began.
    """
    erased = _last_erasures(lake)
    if erased is None:
        return rows
    location = [SOURCE_FILE, RECORD_LOCATION]
    unreadable = rows.filter(F.col("user_id").isNull() & F.col(PAYLOAD).isNotNull())
    words = unreadable.select(*location, F.explode(payload_words(F.col(PAYLOAD))).alias("word"))
    mentions = words.withColumn("id_hash", salted_hash(lake, F.col("word")))
    mentions = mentions.join(erased, "id_hash")
    mentions = mentions.groupBy(*location).agg(F.max("erased_until").alias("mentioned_until"))
    rows = rows.withColumn("id_hash", salted_hash(lake, F.col("user_id")))
    rows = rows.join(erased, "id_hash", "left")
    rows = rows.join(mentions, location, "left")
    until = F.coalesce("erased_until", "mentioned_until")
    day_start = F.expr(f"{day_start_sql(lake.spec)} * {MICROS['s']}")
    known_since = day_start
    if known_ts is not None:
        known_since = F.when(F.col("reasons") == "", known_ts).otherwise(day_start)
    is_erased = until.isNotNull() & F.coalesce(known_since <= until, F.lit(True))
    marked = rows.withColumn("reasons", F.when(~is_erased, F.col("reasons")))
    return marked.drop("id_hash", "erased_until", "mentioned_until")


def without_erased(lake: Lake, events: DataFrame) -> DataFrame:
    """Valid events, with `user_id` and `visible_ts`, that no erasure of their user covers."""
    erased = _last_erasures(lake)
    if erased is None:
        return events
    rows = events.withColumn("id_hash", salted_hash(lake, F.col("user_id")))
    rows = rows.join(erased, "id_hash", "left")
    known_ts = F.col("visible_ts") * MICROS["s"]
    is_kept = F.col("erased_until").isNull() | (known_ts > F.col("erased_until"))
    return rows.filter(is_kept).select(events.columns)


def _last_erasures(lake: Lake) -> DataFrame | None:
    """`id_hash` and `erased_until` (µs) of each erased user; None if there is none."""
    schema = user_schemas.erased_users(lake.spec)
    if not lake.exists(schema.name):
        return None
    stored = spark_io.read_table(lake, schema)
    return stored.groupBy("id_hash").agg(F.max("until_ts").alias("erased_until"))


def payload_words(payload: Column) -> Column:
    """The parts of a record that may be an id: between quotes, and between separators."""
    quoted = F.regexp_extract_all(payload, F.lit(r'"([^"]*)"'), F.lit(1))
    return F.array_union(quoted, F.split(payload, ID_SEPARATORS))
