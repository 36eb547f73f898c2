"""The schema of each table, derived from the data spec."""

from dataclasses import replace
from datetime import date

from etl.errors import UserError
from etl.event_time import MAX_CLOCK_SKEW_SECONDS, MIN_EVENT_TS, day_end_sql, day_start_sql
from etl.spec.attributes import NumericAttribute
from etl.spec.model import DataSpec
from etl.spec.units import MICROS
from etl.tables.audience_schemas import AUDIENCE_SCHEMAS
from etl.tables.declared_columns import (
    AUCTION_TYPES,
    auction_columns,
    counter_columns,
    encoded_sql_type,
    event_columns,
    history_attribute_columns,
    item_counter_key_columns,
    logged_sql_type,
)
from etl.tables.feature_schemas import feature_statistics
from etl.tables.forecast_schemas import FORECAST_SCHEMAS
from etl.tables.label_schemas import impressions, late_retractions
from etl.tables.model_schemas import scores, teacher_predictions, user_teacher_embeddings
from etl.tables.roi_schemas import ROI_SCHEMAS
from etl.tables.table_schema import PARTITION_COLUMNS, TableSchema, UserRows
from etl.tables.user_schemas import erased_users, user_event_counts

HISTORY_BYTE_PLANES = (
    *(f"{name}_{k}" for name in ("gaps", "lags", "items") for k in range(4)),
    *("surfaces", "types", "dwells"),
)
NO_DAY = date(1970, 1, 1)  # in place of a landing day that is not known
STATIC_DAY = NO_DAY  # landing day of attributes without a time
RESERVED_ITEM_INDICES = 16  # index 0: no item; 1 to 15: items without an index, by hash of the id


def events(spec: DataSpec) -> TableSchema:
    """One valid event; `visible_ts` is in seconds, `event_ts` and `ingest_ts` in microseconds."""
    columns = {
        "event_id": "string",
        "user_id": "string",
        "item_id": "string",
        "surface": "tinyint",
        "type": "tinyint",
        "event_ts": "bigint",
        "ingest_ts": "bigint",
        "visible_ts": "bigint",
        "request_id": "string",
        "impression_id": "string",
        "position": "int",
        "dwell_ms": "double",
        "value": "double",
        "propensity": "double",
        **({"retracted_event_id": "string"} if spec.retraction_types else {}),
        **{name: logged_sql_type(attribute) for name, attribute in event_columns(spec).items()},
        "log": "string",
        "source_file": "string",
    }
    return TableSchema(
        "events",
        columns | PARTITION_COLUMNS,
        ("day", "bucket"),
        order_by=("user_id", "visible_ts", "event_ts", "event_id"),
        required_columns={
            "no event id": "event_id",
            "no user": "user_id",
            "no item": "item_id",
            "unknown surface": "surface",
            "unknown type": "type",
            "no event time": "event_ts",
            "no ingest time": "ingest_ts",
            "no day": "day",
        },
        constraints=_event_constraints(spec),
        user_rows=UserRows("user_id", "visible_ts"),
        statistics=("visible_ts",),
    )


def _event_constraints(spec: DataSpec) -> dict[str, str]:
    latest = (
        f"({day_end_sql(spec)} + {spec.allowed_lateness + MAX_CLOCK_SKEW_SECONDS}) * {MICROS['s']}"
    )
    max_skew_us = MAX_CLOCK_SKEW_SECONDS * MICROS["s"]
    retractions = ", ".join(str(spec.event_codes[name]) for name in spec.retraction_types)
    names_event = f"type NOT IN ({retractions}) OR retracted_event_id IS NOT NULL"
    numbers = ["dwell_ms", "value"]
    numbers += [
        f"event_{name}"
        for name, attribute in spec.attributes.event.items()
        if isinstance(attribute, NumericAttribute)
    ]
    finite = [f"(NOT isnan({c}) AND abs({c}) < 1e300)" for c in numbers]
    return {
        "event time before 2000": f"event_ts >= {MIN_EVENT_TS}",
        "event time after its day": f"event_ts <= {latest}",
        "ingest time after its day": f"ingest_ts <= {latest}",
        "event time after its ingest": f"event_ts <= ingest_ts + {max_skew_us}",
        "negative dwell": "dwell_ms >= 0",
        "not a number": " AND ".join(f"coalesce({rule}, true)" for rule in finite),
        "propensity is no probability": "propensity > 0 AND propensity <= 1",
        **({"no event that it takes back": names_event} if retractions else {}),
    }


def excluded_events(spec: DataSpec) -> TableSchema:
    """One valid event that is not used, with the reason: it was late, or above the cap per user."""
    columns = {"reason": "string"} | events(spec).columns
    columns.pop("bucket")
    order = ("reason", "user_id", "event_ts", "event_id")
    return TableSchema(
        *("excluded_events", columns, ("day",), order),
        user_rows=UserRows("user_id", "visible_ts"),
        statistics=("visible_ts",),
    )


def quarantine(spec: DataSpec) -> TableSchema:
    """One bad record: its payload, file and line (from 1), and the reasons why it is invalid."""
    columns = {
        "log": "string",
        "payload": "string",
        "source_file": "string",
        "line": "bigint",
        "reasons": "array<string>",
        "day": "date",
    }
    order = ("source_file", "line")
    user_rows = UserRows("payload", day_start_sql(spec))
    return TableSchema("quarantine", columns, ("day", "log"), order, user_rows=user_rows)


def ingest_metrics(_spec: DataSpec) -> TableSchema:
    """Counts of one day's records: read = kept + quarantined + duplicates + excluded."""
    counts = ("read", "kept", "quarantined", "duplicates", "excluded")
    rule = {"records were lost": "read = kept + quarantined + duplicates + excluded"}
    columns = dict.fromkeys(counts, "bigint") | {"day": "date"}
    return TableSchema("ingest_metrics", columns, ("day",), constraints=rule, user_rows=None)


def attributes(spec: DataSpec, entity: str) -> TableSchema:
    """One version of a user or item, valid from `valid_from` (µs) until its next version."""
    declared = getattr(spec.attributes, entity)
    columns = {f"{entity}_id": "string", "valid_from": "bigint"}
    columns |= {f"attr_{name}": logged_sql_type(a) for name, a in declared.items()}
    rules = {}
    if entity == "item":
        columns |= {name: AUCTION_TYPES[name] for name in auction_columns(spec)}
        if "target_roas" in columns:
            is_valid = "target_roas is null or (target_roas >= 0 and target_roas < 1e15)"
            rules = {"target ROAS is negative or not finite": is_valid}
    name = f"attributes_{entity}"
    order = (f"{entity}_id", "valid_from")
    required = {f"no {entity}": f"{entity}_id", "no time": "valid_from"}
    user_rows = UserRows("user_id", day_start_sql(spec)) if entity == "user" else None
    columns |= {"day": "date"}
    return TableSchema(name, columns, ("day",), order, required, rules, user_rows=user_rows)


def attribute_snapshots(spec: DataSpec, entity: str) -> TableSchema:
    """Versions of a user or item that may be valid after a day, once a week.

    These are the latest version at the end of the day, and those that become valid later; of items
    also the first version, whose attributes are counter keys.
    `landing_day` is the day of the version in the table of attributes.
    """
    versions = attributes(spec, entity)
    columns = {name: type_ for name, type_ in versions.columns.items() if name != "day"}
    columns |= {"landing_day": "date", "day": "date"}
    user_rows = (
        UserRows("user_id", day_start_sql(spec, "landing_day")) if entity == "user" else None
    )
    return replace(
        versions,
        name=f"{versions.name}_snapshots",
        columns=columns,
        required_columns=versions.required_columns | {"no landing day": "landing_day"},
        user_rows=user_rows,
    )


def items(_spec: DataSpec) -> TableSchema:
    """One item: its index, which is never reused, and the day on which it was first logged."""
    columns = {"item_id": "string", "item_index": "int", "day": "date"}
    required = {"no item": "item_id", "no index": "item_index"}
    rules = {"a reserved index": f"item_index >= {RESERVED_ITEM_INDICES}"}
    return TableSchema("items", columns, ("day",), ("item_index",), required, rules, user_rows=None)


def item_versions(spec: DataSpec) -> TableSchema:
    """One version of an item from `valid_from` (µs) on, as models and counters read it."""
    columns = {"item_index": "int", "valid_from": "bigint"}
    columns |= {f"item_{name}": encoded_sql_type(a) for name, a in spec.attributes.item.items()}
    columns |= dict.fromkeys(item_counter_key_columns(spec), "bigint")
    required = {"no index": "item_index", "no time": "valid_from"}
    order = ("item_index", "valid_from")
    columns |= {"day": "date"}
    return TableSchema("item_versions", columns, ("day",), order, required, user_rows=None)


def first_item_versions(spec: DataSpec) -> TableSchema:
    """The counter keys of an item in its first version, by the day of `item_versions` that has it.

    An item has another row if a later day has a version with an earlier `valid_from`.
    """
    columns = {"item_index": "int", "valid_from": "bigint"}
    columns |= dict.fromkeys(item_counter_key_columns(spec), "bigint") | {"day": "date"}
    required = {"no index": "item_index", "no time": "valid_from"}
    order = ("item_index",)
    return TableSchema("first_item_versions", columns, ("day",), order, required, user_rows=None)


def history(spec: DataSpec) -> TableSchema:
    """Events of one user that became visible on one day, packed (features/history/codec.py).

    Compacted rows hold all events up to their day: `chunk` numbers them, from 0, and is null in
    other rows; `dropped` is how many older events of the user compaction has removed.
    """
    columns = {
        "user_id": "string",
        "chunk": "int",
        "dropped": "int",
        "first_ts": "bigint",
        "events": "int",
        **dict.fromkeys((*HISTORY_BYTE_PLANES, *history_attribute_columns(spec)), "binary"),
    }
    required = {f"no {name}": name for name in columns if name != "chunk"}
    order = ("user_id", "chunk")
    columns |= PARTITION_COLUMNS
    partitions, user_rows = ("day", "bucket"), UserRows("user_id", "first_ts")
    return TableSchema(
        *("history", columns, partitions, order, required),
        user_rows=user_rows,
        statistics=("chunk",),
    )


def examples(spec: DataSpec) -> TableSchema:
    """One impression: a pointer into its user's history, and its non-sequence features.

    `user_known_since` (seconds) is when the user's version became valid, `item_known_since` when
    the first version of the item did; null where none was known.
    """
    columns = {
        "impression_id": "string",
        "request_id": "string",
        "user_id": "string",
        "item_index": "int",
        "surface": "tinyint",
        "as_of_ts": "bigint",
        "history_length": "int",
        "history_version": "bigint",
    }
    order = ("user_id", "as_of_ts", "request_id", "impression_id")
    required = {f"no {name}": name for name in columns}
    columns |= {"user_known_since": "bigint", "item_known_since": "bigint"}
    for prefix, declared in (("user", spec.attributes.user), ("ctx", spec.attributes.context)):
        columns |= {f"{prefix}_{name}": encoded_sql_type(a) for name, a in declared.items()}
    columns |= counter_columns(spec)
    rules = {"history of negative length": "history_length >= 0"}
    return TableSchema(
        "examples",
        columns | PARTITION_COLUMNS,
        ("day", "bucket"),
        order,
        required,
        rules,
        user_rows=UserRows("user_id", None),
        statistics=("user_known_since", "item_known_since"),
    )


TABLE_SCHEMAS = (
    events,
    quarantine,
    excluded_events,
    ingest_metrics,
    impressions,
    items,
    item_versions,
    first_item_versions,
    history,
    user_event_counts,
    examples,
    feature_statistics,
    teacher_predictions,
    user_teacher_embeddings,
    scores,
    erased_users,
)


def table_registry(spec: DataSpec) -> dict[str, TableSchema]:
    """The schemas of all tables of a spec, by name."""
    registry = [schema(spec) for schema in TABLE_SCHEMAS]
    for entity in ("user", "item"):
        registry += [attributes(spec, entity), attribute_snapshots(spec, entity)]
    registry += [late_retractions(spec)] if spec.retraction_types else []
    registry += [schema(spec) for schema in AUDIENCE_SCHEMAS] if spec.audiences else []
    registry += [schema(spec) for schema in FORECAST_SCHEMAS] if spec.forecast else []
    registry += [schema(spec) for schema in ROI_SCHEMAS] if spec.roi else []
    return {schema.name: schema for schema in registry}


def table_schema(spec: DataSpec, name: str) -> TableSchema:
    """The schema of a table; raises UserError if the spec has no such table."""
    registry = table_registry(spec)
    if name not in registry:
        raise UserError(f"no table is called {name}; known: {', '.join(registry)}")
    return registry[name]
