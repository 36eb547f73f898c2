"""Raw records to canonical events, each with the reasons why it is not clean."""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from etl.local_time import day_of
from etl.sources.raw import DAY, FAULT, PAYLOAD, raw_value
from etl.spec.model import DataSpec
from etl.spec.sources import EventLog, ImpressionLog, Outcome
from etl.spec.units import MICROS
from etl.tables import contracts
from etl.tables.contracts import context_columns, raw_type

SEPARATOR = "; "
LATEST_US = 100_000_000_000_000_000  # the year 5138: beyond it a number is no time


def needed_columns(log: EventLog | ImpressionLog) -> list[str]:
    """Columns of a log without which no record of a file can be clean."""
    c = log.columns
    ids = (c.event_id,) if isinstance(c.event_id, str) else c.event_id or ()
    day = log.day.column if log.day else None
    return list(filter(None, (c.user, c.item, c.surface, c.event_time, c.type, *ids, day)))


def raw_columns(spec: DataSpec, log: EventLog | ImpressionLog) -> list[str]:
    """All columns of a log that the spec names."""
    named = log.columns.model_dump()
    ids = named.pop("event_id") or ()
    columns = [name for name in named.values() if name]
    columns += [ids] if isinstance(ids, str) else list(ids)
    columns += [a.column or n for n, a in context_columns(spec).items()]
    columns += [log.day.column] if log.day else []
    if isinstance(log, ImpressionLog):
        for outcome in log.outcomes:
            columns += filter(None, (outcome.when, outcome.delay, outcome.dwell, outcome.value))
    return columns


def canonical(spec: DataSpec, log: EventLog | ImpressionLog, raw: DataFrame) -> DataFrame:
    """Columns of the events table but `visible_ts` and `bucket`; and `reasons`, `payload`, `named`.

    `day` is the day on which the record landed. `reasons` are cut by `SEPARATOR`, and empty for
    a clean event, whose `payload` is null. `named` is the impression that the record names.
    """
    c = log.columns
    fields: dict[str, tuple[str | None, str]] = {
        "user_id": (c.user, "string"),
        "item_id": (c.item, "string"),
        "request_id": (c.request, "string"),
        "position": (c.position, "int"),
        "dwell_ms": (c.dwell, "double"),
        "value": (c.value, "double"),
        "propensity": (c.propensity, "double"),
    }
    fields |= {f"x_{n}": (a.column or n, raw_type(a)) for n, a in context_columns(spec).items()}
    values = {name: _cast(column, type_) for name, (column, type_) in fields.items()}
    values |= {name: F.nullif(values[name], F.lit("")) for name in ("user_id", "item_id")}
    times = {"event_ts": _micros(log, c.event_time)}
    times["ingest_ts"] = _micros(log, c.ingest_time) if c.ingest_time else times["event_ts"]
    codes = _codes(spec, log)
    mistyped = [
        _when(raw_value(column).isNotNull() & values[name].isNull(), f"wrong type: {column}")
        for name, (column, type_) in fields.items()
        if column and type_ != "string"
    ]
    rows = raw.select(
        "*",
        F.nullif(_event_id(log), F.lit("")).alias("event_id"),
        *[value.alias(name) for name, value in (values | times | codes).items()],
        F.concat_ws(SEPARATOR, *mistyped).alias("mistyped"),
    )
    rows = rows.withColumn("day", _landing_day(spec, log))
    rows = rows.withColumn("named", _cast(c.impression, "string"))
    if isinstance(log, EventLog):
        rows = rows.withColumn("impression_id", _impression_id(spec))
    else:
        rows = _explode(spec, log, rows.withColumn("reasons", _reasons(spec)))
    rows = rows.withColumn("reasons", _reasons(spec))
    return rows.withColumn(PAYLOAD, F.when(F.col("reasons") != "", F.col(PAYLOAD)))


def _cast(column: str | None, type_: str) -> Column:
    if column is None:
        return F.lit(None).cast(type_)
    return raw_value(column).try_cast(type_)


def _micros(log: EventLog | ImpressionLog, column: str) -> Column:
    micros = F.try_multiply(_cast(column, "bigint"), F.lit(MICROS[log.time_unit]))
    return F.when(F.abs(micros) < LATEST_US, micros)


def _event_id(log: EventLog | ImpressionLog) -> Column:
    c = log.columns
    if isinstance(c.event_id, str):
        return raw_value(c.event_id)
    default = (c.user, c.item, c.event_time, *filter(None, (c.type,)))
    return F.concat_ws("-", *[raw_value(name) for name in c.event_id or default])


def _codes(spec: DataSpec, log: EventLog | ImpressionLog) -> dict[str, Column]:
    logged = {s.logged_as or n: spec.surface_codes[n] for n, s in spec.surfaces.items()}
    codes = {"surface": _lookup(log.columns.surface, logged)}
    if isinstance(log, EventLog) and log.columns.type:
        names = log.types or {name: name for name in spec.events}
        types = {name: spec.event_codes[event] for name, event in names.items()}
        codes["type"] = _lookup(log.columns.type, types)
    else:
        always = (isinstance(log, EventLog) and log.event) or spec.impression
        codes["type"] = F.lit(spec.event_codes[always]).cast("tinyint")
    return codes


def _lookup(column: str, codes: dict[str, int]) -> Column:
    pairs = [F.lit(part) for pair in codes.items() for part in pair]
    return F.try_element_at(F.create_map(*pairs), raw_value(column)).cast("tinyint")


def _impression_id(spec: DataSpec) -> Column:
    own = F.when(F.col("type") == spec.event_codes[spec.impression], F.col("event_id"))
    return F.coalesce("named", own)


def _landing_day(spec: DataSpec, log: EventLog | ImpressionLog) -> Column:
    if log.day:
        text = raw_value(log.day.column)
        pattern = log.day.format.replace("%Y", "yyyy").replace("%m", "MM").replace("%d", "dd")
        return F.try_to_timestamp(text, F.lit(pattern)).cast("date")
    ingested = F.floor(F.col("ingest_ts") / MICROS["s"])
    return F.coalesce(F.col(DAY), day_of(spec, ingested))


def _explode(spec: DataSpec, log: ImpressionLog, rows: DataFrame) -> DataFrame:
    """One row an event: the impression, and where that is clean each outcome that happened."""
    impression = F.struct(
        F.lit(spec.event_codes[spec.impression]).cast("tinyint").alias("type"),
        F.lit("").alias("suffix"),
        F.lit(0).cast("bigint").alias("delay"),
        F.lit(None).cast("double").alias("dwell_ms"),
        F.lit(None).cast("double").alias("value"),
    )
    made = [_outcome(spec, log, outcome) for outcome in log.outcomes]
    made = [F.when(F.col("reasons") == "", event) for event in made]
    rows = rows.withColumn("impression_id", F.col("event_id"))
    rows = rows.withColumn("made", F.explode(F.array_compact(F.array(impression, *made))))
    remade = {"made", "event_id", "event_ts", "ingest_ts", "type", "dwell_ms", "value"}
    return rows.select(
        *[name for name in rows.columns if name not in remade],
        *[F.col(f"made.{name}") for name in ("type", "dwell_ms", "value")],
        F.concat("event_id", "made.suffix").alias("event_id"),
        (F.col("event_ts") + F.col("made.delay")).alias("event_ts"),
        (F.col("ingest_ts") + F.col("made.delay")).alias("ingest_ts"),
    )


def _outcome(spec: DataSpec, log: ImpressionLog, outcome: Outcome) -> Column:
    delay = F.coalesce(_micros(log, outcome.delay), F.lit(0)) if outcome.delay else F.lit(0)
    event = F.struct(
        F.lit(spec.event_codes[outcome.event]).cast("tinyint").alias("type"),
        F.lit(f":{outcome.event}").alias("suffix"),
        F.greatest(delay, F.lit(0)).cast("bigint").alias("delay"),
        _cast(outcome.dwell, "double").alias("dwell_ms"),
        _cast(outcome.value, "double").alias("value"),
    )
    if outcome.when is None:
        return event
    return F.when(F.coalesce(_cast(outcome.when, "double"), F.lit(0)) != 0, event)


def _reasons(spec: DataSpec) -> Column:
    """What is amiss with the file or the record as such; else each breach of the contract."""
    breaches = contracts.events(spec).breaches.items()
    broken = [_when(F.expr(condition), said) for said, condition in breaches]
    mistyped = _when(F.col("mistyped") != "", F.col("mistyped"))
    return F.coalesce(FAULT, F.concat_ws(SEPARATOR, *broken, mistyped))


def _when(rule: Column, reason: str | Column) -> Column:
    return F.when(rule, F.lit(reason))
