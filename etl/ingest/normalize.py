"""Raw records of event and impression logs as rows of the `events` table, valid or not.

A record that breaks a rule keeps its payload and the reasons; see etl/ingest/quarantine.py.
"""

import functools
from collections.abc import Collection, Iterable, Iterator, Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from etl.event_time import visible_ts_sql
from etl.ingest.attribute_values import attribute_value
from etl.ingest.expressions import IS_SELECTED
from etl.ingest.file_discovery import RawSelection
from etl.ingest.log_columns import LogSource, logged_attributes, read_log_records
from etl.ingest.readers import PATH_DAY, PAYLOAD, READ_ERROR, RECORD_LOCATION, raw_value
from etl.ingest.timestamps import duration_micros, local_date, parse_time
from etl.spec.model import DataSpec
from etl.spec.sources import EventLogSource, ImpressionLogSource, OutcomeColumns
from etl.spec.units import MICROS
from etl.tables import schemas
from etl.tables.declared_columns import logged_sql_type

REASON_SEPARATOR = "; "
ID_FIELDS = {"user_id", "item_id", "request_id", "retracted_event_id"}
# Fields that an event may have from the event that it belongs to, and their columns in tables.
NAMED_FIELDS = {"user": "user_id", "item": "item_id", "surface": "surface"}


def read_logs(spec: DataSpec, selection: RawSelection) -> DataFrame:
    """Normalized records of all logs in the selected files; see `normalize_events`."""
    logs = [read_log(spec, name, selection) for name in spec.log_sources]
    return functools.reduce(DataFrame.unionByName, logs)


def read_log(spec: DataSpec, log_name: str, selection: RawSelection) -> DataFrame:
    """Normalized records of one log in the selected files."""
    log = spec.log_sources[log_name]
    records = read_log_records(spec, log, selection)
    return normalize_events(spec, log_name, records, RECORD_LOCATION)


def normalize_events(
    spec: DataSpec, log_name: str, records: DataFrame, location_column: str
) -> DataFrame:
    """One row per event of a log, in a single pass over its raw records.

    Returns:
        The columns of `events` except `bucket`; `reasons`, joined by `REASON_SEPARATOR`, empty for
        a valid event, and null for a record that the source skips; `payload`, null unless the event
        is invalid; `logged_impression_id` and `logged_touch_id`, which the record names, and
        `logged_touch_key`, which it shares with its touch; and `location_column`, passed through.

        Fields that events have from other events are null, and such events keep their payload:
        see `etl.ingest.named_events`.
    """
    log = spec.log_sources[log_name]
    rows = _parse_fields(spec, log, records)
    rows = rows.withColumn("day", _landing_day(spec, log))
    if isinstance(log, ImpressionLogSource):
        rows = _explode_outcomes(spec, log, rows)
    else:
        rows = rows.withColumn("impression_id", _impression_id(spec))
    rows = rows.withColumn("reasons", _rejection_reasons(spec, log))
    columns = [name for name in schemas.events(spec).columns if name != "bucket"]
    is_payload_kept = (F.col("reasons") != "") | F.lit(log.reference_column is not None)
    rows = rows.withColumns(
        {
            "log": F.lit(log_name),
            "visible_ts": F.expr(visible_ts_sql(spec, log.delay)),
            PAYLOAD: F.when(is_payload_kept, F.col(PAYLOAD)),
        }
    )
    references = ("logged_impression_id", "logged_touch_id", "logged_touch_key")
    return rows.select(*columns, "reasons", *references, PAYLOAD, location_column)


def _parse_fields(spec: DataSpec, log: LogSource, records: DataFrame) -> DataFrame:
    """`records` with typed fields; null where a text has another type, named in `type_errors`."""
    field_types = _field_types(spec, log)
    fields = {name: _cast(column, type_) for name, (column, type_) in field_types.items()}
    for name, (column, attribute) in logged_attributes(spec).items():
        field_types[name] = column, logged_sql_type(attribute)
        fields[name] = attribute_value(attribute, column)
    for name in ID_FIELDS & fields.keys():
        fields[name] = _null_if_empty(fields[name])
    typed_values = [
        (column, fields[name])
        for name, (column, type_) in field_types.items()
        if column and type_ != "string"
    ]
    if isinstance(log, ImpressionLogSource):
        typed_values += [value for o in log.outcomes for value in _outcome_values(log, o)]
    columns = fields | _timestamps(spec, log) | _codes(spec, log)
    columns |= {
        "event_id": _null_if_empty(_event_id(log)),
        "logged_impression_id": _null_if_empty(_cast(log.columns.impression, "string")),
        "logged_touch_id": _null_if_empty(_cast(log.columns.touch, "string")),
        "logged_touch_key": _null_if_empty(_cast(log.touch_key_column, "string")),
        "type_errors": _type_errors(typed_values),
    }
    return records.select("*", *[value.alias(name) for name, value in columns.items()])


def _type_errors(typed_values: Iterable[tuple[str, Column]]) -> Column:
    """A reason for each raw column that has a text, of which a typed value is null."""
    is_null: dict[str, Column] = {}
    for column, value in typed_values:
        is_null[column] = is_null.get(column, F.lit(False)) | value.isNull()
    errors = [
        F.when(raw_value(column).isNotNull() & is_bad, F.lit(f"wrong type: {column}"))
        for column, is_bad in is_null.items()
    ]
    return F.concat_ws(REASON_SEPARATOR, *errors)


def _field_types(spec: DataSpec, log: LogSource) -> dict[str, tuple[str | None, str]]:
    """Raw column (None where the log has none) and SQL type of each field but attributes."""
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
    if spec.retraction_types:
        fields["retracted_event_id"] = (c.retracts, "string")
    return fields


def _cast(column: str | None, type_: str) -> Column:
    if column is None:
        return F.lit(None).cast(type_)
    return raw_value(column).try_cast(type_)


def _null_if_empty(id_: Column) -> Column:
    """An id, null where a log has an empty text for none."""
    return F.nullif(id_, F.lit(""))


def _timestamps(spec: DataSpec, log: LogSource) -> dict[str, Column]:
    """Event time and ingest time in µs; a log without ingest times is ingested at event time."""
    event_ts = parse_time(spec, log.time_unit, raw_value(log.columns.event_time))
    ingested = log.columns.ingest_time
    return {
        "event_ts": event_ts,
        "ingest_ts": (
            parse_time(spec, log.time_unit, raw_value(ingested)) if ingested else event_ts
        ),
    }


def _event_id(log: LogSource) -> Column:
    c = log.columns
    if isinstance(c.event_id, str):
        return raw_value(c.event_id)
    default = dict.fromkeys((c.user, c.item, log.reference_column, c.event_time, c.type))
    return F.concat_ws("-", *[raw_value(name) for name in c.event_id or filter(None, default)])


def _codes(spec: DataSpec, log: LogSource) -> dict[str, Column]:
    """Codes of surface and event type; null for a value that the spec does not know."""
    surfaces = {s.logged_as or n: spec.surface_codes[n] for n, s in spec.surfaces.items()}
    codes = {"surface": _lookup_code(log.columns.surface, surfaces)}
    if isinstance(log, EventLogSource) and log.columns.type:
        names = log.types or {name: name for name in spec.events}
        types = {name: spec.event_codes[event] for name, event in names.items()}
        codes["type"] = _lookup_code(log.columns.type, types)
    else:
        only_type = (isinstance(log, EventLogSource) and log.event) or spec.impression_type
        codes["type"] = F.lit(spec.event_codes[only_type]).cast("tinyint")
    return codes


def _lookup_code(column: str | None, codes: dict[str, int]) -> Column:
    if column is None:
        return F.lit(None).cast("tinyint")
    pairs = [F.lit(part) for pair in codes.items() for part in pair]
    return F.try_element_at(F.create_map(*pairs), raw_value(column)).cast("tinyint")


def _impression_id(spec: DataSpec) -> Column:
    """The impression ID of an event; for an impression that names none, its event ID."""
    own = F.when(F.col("type") == spec.event_codes[spec.impression_type], F.col("event_id"))
    return F.coalesce("logged_impression_id", own)


def _landing_day(spec: DataSpec, log: LogSource) -> Column:
    """The landing day of a record: that in its path, else the logged one or that of its ingest."""
    if log.day:
        text = raw_value(log.day.column)
        pattern = log.day.format.replace("%Y", "yyyy").replace("%m", "MM").replace("%d", "dd")
        own_day = F.try_to_timestamp(text, F.lit(pattern)).cast("date")
        if not log.is_partitioned_by_day:  # in quarantine, PATH_DAY is the day that was read before
            return F.coalesce(own_day, F.col(PATH_DAY))
    else:
        own_day = local_date(spec, F.floor(F.col("ingest_ts") / MICROS["s"]))
    return F.coalesce(F.col(PATH_DAY), own_day)  # only runs of that day read the file


def _explode_outcomes(spec: DataSpec, log: ImpressionLogSource, rows: DataFrame) -> DataFrame:
    """One row per event: the impression and, where that is valid, each outcome that occurred."""
    impression = F.struct(
        F.lit(spec.event_codes[spec.impression_type]).cast("tinyint").alias("type"),
        F.lit("").alias("suffix"),
        F.lit(0).cast("bigint").alias("delay"),
        F.lit(None).cast("double").alias("dwell_ms"),
        F.lit(None).cast("double").alias("value"),
        *_event_attributes(spec, ()),
    )
    rows = rows.withColumn("impression_id", F.col("event_id"))
    rows = rows.withColumn("is_valid", _rejection_reasons(spec, log) == "")
    outcomes = [
        F.when(F.col("is_valid"), _outcome_event(spec, log, outcome)) for outcome in log.outcomes
    ]
    events = F.array_compact(F.array(impression, *outcomes))
    rows = rows.withColumn("outcome", F.explode(events))
    of_outcome = ("type", "dwell_ms", "value", *(f"event_{n}" for n in spec.attributes.event))
    replaced = {"outcome", "event_id", "event_ts", "ingest_ts", *of_outcome}
    return rows.select(
        *[name for name in rows.columns if name not in replaced],
        *[F.col(f"outcome.{name}") for name in of_outcome],
        F.concat("event_id", "outcome.suffix").alias("event_id"),
        (F.col("event_ts") + F.col("outcome.delay")).alias("event_ts"),
        (F.col("ingest_ts") + F.col("outcome.delay")).alias("ingest_ts"),
    )


def _event_attributes(spec: DataSpec, names: Collection[str]) -> list[Column]:
    """The attributes of an event of a wide log: those of some names, others null.

    An event must not show what its record knows only by a later outcome.
    """
    return [
        F.when(F.lit(name in names), F.col(f"event_{name}")).alias(f"event_{name}")
        for name in spec.attributes.event
    ]


def _outcome_event(spec: DataSpec, log: ImpressionLogSource, outcome: OutcomeColumns) -> Column:
    """An outcome of an impression as a struct; null if its indicator is 0, false or missing."""
    delay = F.lit(0)
    if outcome.delay:
        delay = F.coalesce(duration_micros(log.time_unit, raw_value(outcome.delay)), delay)
    event = F.struct(
        F.lit(spec.event_codes[outcome.event]).cast("tinyint").alias("type"),
        F.lit(f":{outcome.event}").alias("suffix"),
        F.greatest(delay, F.lit(0)).cast("bigint").alias("delay"),
        _cast(outcome.dwell, "double").alias("dwell_ms"),
        _cast(outcome.value, "double").alias("value"),
        *_event_attributes(spec, outcome.attributes),
    )
    return F.when(F.coalesce(_has_occurred(outcome), F.lit(False)), event)


def _has_occurred(outcome: OutcomeColumns) -> Column:
    """Whether an outcome occurred; null if its indicator is missing, or neither number nor flag."""
    if outcome.indicator is None:
        return F.lit(True)
    is_nonzero = _cast(outcome.indicator, "double") != 0
    return F.coalesce(is_nonzero, _cast(outcome.indicator, "boolean"))


def _outcome_values(
    log: ImpressionLogSource, outcome: OutcomeColumns
) -> Iterator[tuple[str, Column]]:
    """Raw columns of an outcome with their typed values; 0 for those of one that did not occur."""
    occurred = _has_occurred(outcome)
    if outcome.indicator:
        yield outcome.indicator, occurred
    values = {name: _cast(name, "double") for name in (outcome.dwell, outcome.value) if name}
    for name, value in values.items():
        yield name, F.when(occurred, value).otherwise(0)
    if outcome.delay:
        delay = duration_micros(log.time_unit, raw_value(outcome.delay))
        yield outcome.delay, F.when(occurred, delay).otherwise(0)


def _rejection_reasons(spec: DataSpec, log: LogSource) -> Column:
    """Why a row is invalid: the read error of its file or record, or each violated rule.

    A field that an event has from another event may be missing.
    """
    schema = schemas.events(spec)
    may_be_null = {NAMED_FIELDS[name] for name in log.fields_of_named}
    allowed = {r for r, column in schema.required_columns.items() if column in may_be_null}
    violations = {r: rule for r, rule in schema.violations.items() if r not in allowed}
    reasons = [F.when(F.expr(rule), F.lit(reason)) for reason, rule in violations.items()]
    reasons.append(F.when(F.col("type_errors") != "", F.col("type_errors")))
    references = {
        "no touch": (log.columns.touch, "logged_touch_id"),
        "no impression": (log.columns.impression, "logged_impression_id"),
        "no touch key": (log.columns.touch_key, "logged_touch_key"),
    }
    for reason, (column, field) in references.items():
        if column and column == log.reference_column:
            reasons.append(F.when(F.col(field).isNull(), F.lit(reason)))
    return joined_reasons(reasons)


def joined_reasons(reasons: Sequence[Column]) -> Column:
    """The read error of a record, else the reasons that are not null; null if it is skipped."""
    joined = F.coalesce(READ_ERROR, F.concat_ws(REASON_SEPARATOR, *reasons))
    return F.when(F.col(IS_SELECTED), joined)
