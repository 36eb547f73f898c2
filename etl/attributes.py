"""The attributes step: attribute files to versioned rows of users and items."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import date

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F

from etl.attribute_versions import (
    build_version_snapshots,
    changed_versions,
)
from etl.erasure.erased_users import mark_erased
from etl.errors import UserError
from etl.event_time import day_end_sql, day_start_sql
from etl.ingest.arrival import file_states_by_day, record_attribute_files
from etl.ingest.attribute_values import attribute_value
from etl.ingest.expressions import IS_SELECTED
from etl.ingest.file_discovery import RawSelection
from etl.ingest.normalize import REASON_SEPARATOR, joined_reasons
from etl.ingest.quarantine import check_bad_row_rate, write_quarantine
from etl.ingest.readers import (
    PATH_DAY,
    PAYLOAD,
    READ_ERROR,
    RECORD_LOCATION,
    SOURCE_FILE,
    raw_value,
    read_raw_records,
    translate_read_errors,
    with_line_numbers,
)
from etl.ingest.run import check_no_later_days
from etl.ingest.timestamps import parse_time
from etl.spec.model import DataSpec
from etl.spec.sources import AttributeSource
from etl.spec.units import MICROS, DayRange
from etl.tables import schemas, spark_io
from etl.tables.day_order import last_finished_day
from etl.tables.declared_columns import AUCTION_TYPES, auction_columns
from etl.tables.lake import Lake, create_table
from etl.tables.schemas import STATIC_DAY
from etl.tables.weekly_snapshots import remove_snapshots_from

LAST_DAY_PROPERTY = "gemline.last_day"  # of the loaded ones, if it only repeats versions


def load_attributes(lake: Lake, raw: str, days: DayRange) -> dict[str, int]:
    """Replace the rows of `attributes_user` and `attributes_item` that landed on a range of days.

    A source without `{day}` in its path is a snapshot, read as it is now. Rows of a `static`
    snapshot are added once and may not change; without a new one nothing is written. Changed rows
    of any other snapshot land on the last of the days; if later days have been ingested, the
    snapshot is not read. Of items, only versions that differ from the previous one are stored. The
    table of an entity without a source stays empty. All checks precede the first write.

    Returns:
        The number of stored rows by table.

    Raises:
        UserError: If files are missing or unreadable, too many rows are bad, a column that the spec
            names has no values, a static row has changed, or later days of items depend on these.
    """
    sources = {
        name: source
        for name, source in lake.spec.sources.items()
        if isinstance(source, AttributeSource) and _is_readable_for(lake, source, days)
    }
    runs_before_ingest = lake.spec.ingest_uses_item_attributes
    file_states = file_states_by_day(sources, raw, days) if runs_before_ingest else {}
    with ExitStack() as stack, translate_read_errors():
        rows = {
            name: stack.enter_context(_read_source(lake, source, raw, days))
            for name, source in sources.items()
        }
        for entity in ("user", "item"):
            create_table(lake, schemas.attributes(lake.spec, entity))
            create_table(lake, schemas.attribute_snapshots(lake.spec, entity))
        for name, source in sources.items():
            _write_source(lake, name, source, rows[name], days)
    record_attribute_files(lake.root, file_states)
    tables = (schemas.attributes(lake.spec, source.entity).name for source in sources.values())
    return {table: lake.count_rows(table) for table in tables}


def _is_readable_for(lake: Lake, source: AttributeSource, days: DayRange) -> bool:
    """Whether a source can describe these days; a snapshot describes the latest day only."""
    if source.static:
        return True
    if source.is_partitioned_by_day:
        table = schemas.attributes(lake.spec, source.entity).name
        if source.stores_changes and lake.exists(table) and lake.count_rows(table):
            if not _are_later_versions_unread(lake, days):
                check_no_later_days(lake, days)
            _check_no_later_versions(lake, table, days)
        return True
    latest = lake.last_ingested_day()
    if latest and latest > days[1]:
        logging.warning(
            "%s is not read: it is a snapshot of %s or later, not of %s; stored versions stay",
            source.location,
            latest,
            days[1],
        )
        return False
    logging.warning(
        "%s is a snapshot: its changes are valid from the end of %s on", source.location, days[1]
    )
    return True


def _are_later_versions_unread(lake: Lake, days: DayRange) -> bool:
    """Whether no step has read versions after some days, although later days may be ingested.

    That is so if this step failed on these days, because those after it were refused then.
    """
    read_until = last_finished_day(lake.root, "items")
    is_read_by_ingest = lake.spec.ingest_uses_item_attributes
    return read_until is not None and read_until <= days[1] and not is_read_by_ingest


def _check_no_later_versions(lake: Lake, table: str, days: DayRange) -> None:
    """Raise UserError if later days were loaded: they lack versions that repeat those of these."""
    last_repeated = lake.open(table).metadata().configuration.get(LAST_DAY_PROPERTY)
    latest = lake.latest_day(table)
    if last_repeated is not None:
        latest = max(latest or days[1], date.fromisoformat(last_repeated))
    if latest is not None and latest > days[1]:
        raise UserError(
            f"attributes of {latest} have been loaded already, as changes of those of {days[0]} to "
            f"{days[1]}: run all days up to it, --days {days[0]}:{latest}"
        )


def _write_source(
    lake: Lake, name: str, source: AttributeSource, rows: DataFrame, days: DayRange
) -> None:
    """Replace the rows of a source in its table and in quarantine.

    The table of a static source without a new row is left as it is.
    """
    invalid = with_line_numbers(rows).filter("reasons != ''").withColumn("log", F.lit(name))
    write_quarantine(lake, [name], invalid, days)
    versions = _latest_versions(rows.filter("reasons = ''"))
    if source.static:
        where = f"day = '{STATIC_DAY}'"
        stored = _read_stored_versions(lake, source).filter(where).select(versions.columns)
        new = _new_static(source, versions, stored)
        if new.isEmpty():
            return
        versions = stored.unionByName(new)
    else:
        first_day = days[0] if source.is_partitioned_by_day else days[1]
        where = spark_io.day_range_predicate(first_day, days[1])
        remove_snapshots_from(
            lake, schemas.attribute_snapshots(lake.spec, source.entity), first_day
        )
        if source.stores_changes:
            versions = changed_versions(lake, source, versions, first_day)
    schema = schemas.attributes(lake.spec, source.entity)
    spark_io.replace_partitions(lake, schema, versions, where, {})
    stores_changes_by_day = source.stores_changes and source.is_partitioned_by_day
    if stores_changes_by_day and lake.latest_day(schema.name) != days[1]:
        last_day = {LAST_DAY_PROPERTY: str(days[1])}
        lake.open(schema.name).alter.set_table_properties(last_day, raise_if_not_exists=False)
    if not source.static:
        build_version_snapshots(lake, source.entity, first_day)


@contextmanager
def _read_source(
    lake: Lake, source: AttributeSource, raw: str, days: DayRange
) -> Iterator[DataFrame]:
    """The parsed and checked rows of a source, cached; raises UserError if a check fails."""
    with spark_io.cached(parse_rows(lake, source, raw, days)) as parsed:
        rows = mark_erased(lake, parsed) if source.entity == "user" else parsed
        _check_rows(lake, source, raw, rows)
        yield rows


def _check_rows(lake: Lake, source: AttributeSource, raw: str, rows: DataFrame) -> None:
    """Raise UserError if a column has no values, too many rows are bad, or a static row changed."""
    non_null = [F.count(name).alias(name) for name in rows.columns if name != RECORD_LOCATION]
    selected = rows.filter("reasons IS NOT NULL")
    counts = selected.agg(*non_null, F.count("*").alias("num_rows")).first()
    assert counts is not None
    _check_declared_columns(lake, source, raw, counts)
    check_bad_row_rate(lake.spec, source.location_in(raw), rows)
    if source.static:
        _check_static_unchanged(lake, source, raw, _latest_versions(rows.filter("reasons = ''")))


def _check_declared_columns(lake: Lake, source: AttributeSource, raw: str, counts: Row) -> None:
    """Raise UserError if a column that the spec names has no valid values."""
    required = {f"{source.entity}_id": source.key, "valid_from": source.valid_from}
    table = schemas.attributes(lake.spec, source.entity).name
    if not lake.exists(table) or not lake.count_rows(table):
        # Only the first load must have all attributes: a day's changes may lack some.
        declared = getattr(lake.spec.attributes, source.entity)
        required |= {f"attr_{name}": a.column or name for name, a in declared.items()}
    for name, column in required.items():
        if column and counts["num_rows"] and not counts[name]:
            raise UserError(
                f"the spec names column {column}, but no record of {source.location_in(raw)} has "
                "a valid value in it; correct the spec, or remove the column from it"
            )


def parse_rows(lake: Lake, source: AttributeSource, raw: str, days: DayRange) -> DataFrame:
    """Typed rows of a source, with `logged_valid_from` and the `reasons` why a row is invalid.

    `reasons` are null for a row that the source skips.
    """
    typed = _typed_columns(lake, source)
    columns = [source.key, *(column for column, _ in typed.values())]
    columns += [source.valid_from] if source.valid_from else []
    rows = read_raw_records(source, RawSelection(raw, days), columns, required=[source.key])
    snapshot_day = STATIC_DAY if source.static else days[1]
    rows = rows.select(
        F.nullif(raw_value(source.key), F.lit("")).alias(f"{source.entity}_id"),
        _logged_valid_from(lake.spec, source).alias("logged_valid_from"),
        *[value.alias(name) for name, (_, value) in typed.items()],
        F.coalesce(PATH_DAY, F.lit(snapshot_day)).alias("day"),
        *("raw", PAYLOAD, SOURCE_FILE, RECORD_LOCATION, READ_ERROR, IS_SELECTED),
    )
    type_errors = [
        F.when(raw_value(column).isNotNull() & F.col(name).isNull(), F.lit(f"wrong type: {column}"))
        for name, (column, _) in typed.items()
    ]
    rows = rows.withColumn("type_errors", F.concat_ws(REASON_SEPARATOR, *type_errors)).drop("raw")
    rows = rows.withColumn("valid_from", _valid_from(lake.spec, source))
    violations = schemas.attributes(lake.spec, source.entity).violations.items()
    reasons = [F.when(F.expr(condition), F.lit(reason)) for reason, condition in violations]
    reasons.append(F.nullif("type_errors", F.lit("")))
    rows = rows.withColumn("reasons", joined_reasons(reasons))
    rows = rows.withColumn(PAYLOAD, F.when(F.col("reasons") != "", F.col(PAYLOAD)))
    return rows.drop("type_errors", IS_SELECTED)


def _typed_columns(lake: Lake, source: AttributeSource) -> dict[str, tuple[str, Column]]:
    """Raw column and typed value of each attribute and auction column, by name."""
    declared = getattr(lake.spec.attributes, source.entity)
    columns = {f"attr_{name}": (a.column or name, a) for name, a in declared.items()}
    typed = {name: (column, attribute_value(a, column)) for name, (column, a) in columns.items()}
    if source.entity == "item":
        for name, column in auction_columns(lake.spec).items():
            typed[name] = column, raw_value(column).try_cast(AUCTION_TYPES[name])
    return typed


def _logged_valid_from(spec: DataSpec, source: AttributeSource) -> Column:
    """The valid-from time that a row contains, in µs; null for a source without `valid_from`."""
    if source.valid_from is None:
        return F.lit(None).cast("bigint")
    return parse_time(spec, source.time_unit, raw_value(source.valid_from))


def _valid_from(spec: DataSpec, source: AttributeSource) -> Column:
    """The time from which a version is valid, in µs.

    It is the time in the row, but not before the start of its landing day. A row without a time may
    have been written at any time of its landing day, and is valid from the end of that day. A
    static row without a time is always valid.
    """
    bound_sql = day_start_sql if source.valid_from else day_end_sql
    earliest = F.lit(0) if source.static else F.expr(f"{bound_sql(spec)} * {MICROS['s']}")
    valid_from = earliest
    if source.valid_from:
        is_stated = F.col("logged_valid_from").isNotNull()
        valid_from = F.when(is_stated, F.greatest("logged_valid_from", earliest))
    return (valid_from + source.delay * MICROS["s"]).cast("bigint")


def _latest_versions(rows: DataFrame) -> DataFrame:
    """One row per key, landing day and time: the last one in the files."""
    provenance = {PAYLOAD, SOURCE_FILE, RECORD_LOCATION, READ_ERROR}
    not_values = {"valid_from", "logged_valid_from", "day", "reasons"} | provenance
    key, *values = [name for name in rows.columns if name not in not_values]
    order = F.struct(
        "logged_valid_from", SOURCE_FILE, f"{RECORD_LOCATION}.block", f"{RECORD_LOCATION}.row"
    )
    latest = F.max_by(F.struct(*values), order).alias("v")
    versions = rows.groupBy("day", key, "valid_from").agg(latest)
    return versions.select("day", key, "valid_from", "v.*")


def _read_stored_versions(lake: Lake, source: AttributeSource) -> DataFrame:
    return spark_io.read_table(lake, schemas.attributes(lake.spec, source.entity))


def _new_static(source: AttributeSource, versions: DataFrame, stored: DataFrame) -> DataFrame:
    """The static rows that are not stored yet."""
    keys = [f"{source.entity}_id", "valid_from"]
    return versions.join(stored.select(keys), keys, "left_anti").select(versions.columns)


def _check_static_unchanged(
    lake: Lake, source: AttributeSource, raw: str, versions: DataFrame
) -> None:
    """Raise UserError if a static row differs from the stored one."""
    table = schemas.attributes(lake.spec, source.entity).name
    if not lake.exists(table):
        return
    key, *values = [name for name in versions.columns if name not in ("day", "valid_from")]
    stored = _read_stored_versions(lake, source).filter(F.col("day") == F.lit(STATIC_DAY))
    stored = stored.select(key, "valid_from", F.struct(*values).alias("stored"))
    pairs = versions.withColumn("new", F.struct(*values)).join(stored, [key, "valid_from"])
    changed = pairs.filter(~F.col("new").eqNullSafe(F.col("stored"))).orderBy(key).first()
    if changed is not None:
        raise UserError(
            f"{source.location_in(raw)} is static in the spec, but its row of {source.entity} "
            f"{changed[key]} has changed since it was loaded: restore the row, or remove `static` "
            "from the spec, so that changes are valid from the day on which they are loaded"
        )
