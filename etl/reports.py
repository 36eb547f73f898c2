"""Reports to tables: labels of data providers, audits, and what campaigns spent."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TypeAlias

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from etl.erasure.erased_users import mark_erased
from etl.errors import UserError
from etl.event_time import day_start_sql
from etl.ingest.expressions import IS_SELECTED
from etl.ingest.file_discovery import RawSelection
from etl.ingest.normalize import joined_reasons
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
from etl.ingest.timestamps import parse_time
from etl.label_versions import build_label_snapshots
from etl.spec.model import DataSpec
from etl.spec.report_sources import (
    AudienceLabelSource,
    AuditSource,
    SpendSource,
)
from etl.spec.sections import UNKNOWN_LABEL
from etl.spec.units import MICROS, DayRange
from etl.tables import audience_schemas, roi_schemas, spark_io
from etl.tables.lake import Lake, create_table
from etl.tables.table_schema import TableSchema
from etl.tables.weekly_snapshots import remove_snapshots_from

Report: TypeAlias = AudienceLabelSource | AuditSource | SpendSource
Schema: TypeAlias = Callable[[DataSpec], TableSchema]
OPTIONAL_COLUMNS = ("label", "incremental_share")  # records may lack them
MAX_SHARE_ERROR = 0.01  # of the sum of the shares of a report, from rounding
AUDIENCE_REPORTS: dict[str, Schema] = {
    "audience_labels": audience_schemas.audience_labels,
    "audits": audience_schemas.audits,
}
SPEND_REPORTS: dict[str, Schema] = {"spend": roi_schemas.campaign_spend}
SCHEMAS = AUDIENCE_REPORTS | SPEND_REPORTS


def load_reports(
    lake: Lake, raw: str, days: DayRange, schemas: Mapping[str, Schema]
) -> dict[str, int]:
    """Replace the rows that landed on a range of days, of sources of some kinds.

    All checks precede the first write.

    Args:
        lake: The lake.
        raw: Folder or URL of the raw files.
        days: First and last day.
        schemas: The table of each kind of source.

    Returns:
        The number of stored rows of the days, by table.

    Raises:
        UserError: If files are missing or unreadable, too many rows are bad, the shares of a report
            do not sum to 1, or it has several counts.
    """
    where = spark_io.day_range_predicate(*days)
    sources = {
        name: source
        for name, source in lake.spec.sources.items()
        if isinstance(source, Report) and source.kind in schemas
    }
    with ExitStack() as stack, translate_read_errors():
        rows = {
            name: stack.enter_context(_read_source(lake, source, raw, days))
            for name, source in sources.items()
        }
        for name, source_rows in rows.items():
            invalid = with_line_numbers(source_rows).filter("reasons != ''")
            write_quarantine(lake, [name], invalid.withColumn("log", F.lit(name)), days)
        for schema in schemas.values():
            create_table(lake, schema(lake.spec))
        if "audience_labels" in schemas:
            remove_snapshots_from(
                lake, audience_schemas.audience_label_snapshots(lake.spec), days[0]
            )
        for kind, schema in schemas.items():
            names = [name for name, source in sources.items() if source.kind == kind]
            _write_rows(lake, schema(lake.spec), [rows[name] for name in names], where)
    if "audience_labels" in schemas:
        build_label_snapshots(lake, days[0])
    tables = [schema(lake.spec).name for schema in schemas.values()]
    return {table: lake.count_rows(table, days) for table in tables}


def _write_rows(lake: Lake, schema: TableSchema, parts: list[DataFrame], where: str) -> None:
    rows = functools.reduce(DataFrame.unionByName, [_stored_rows(part) for part in parts])
    spark_io.replace_partitions(lake, schema, rows, where, {})


def _stored_rows(rows: DataFrame) -> DataFrame:
    """The valid rows: whole audits, spend, and of labels the latest one of each user and time.

    Labels for several earlier times that landed together are all valid from the start of the day.
    """
    valid = rows.filter("reasons = ''")
    if "share" in rows.columns:
        return valid.join(_bad_reports(rows), ["day", "campaign"], "left_anti")
    if "spend" in rows.columns:
        return valid
    order = F.struct(
        "logged_valid_from", SOURCE_FILE, f"{RECORD_LOCATION}.block", f"{RECORD_LOCATION}.row"
    )
    keys = ("day", "audience", "provider", "user_id", "valid_from")
    return valid.groupBy(*keys).agg(F.max_by("label", order).alias("label"))


def _bad_reports(rows: DataFrame) -> DataFrame:
    """Day and campaign of the reports with a row in quarantine, which are not used."""
    bad = rows.filter("reasons != '' AND campaign IS NOT NULL")
    return bad.select("day", "campaign").distinct()


@contextmanager
def _read_source(lake: Lake, source: Report, raw: str, days: DayRange) -> Iterator[DataFrame]:
    """The parsed and checked rows of a source, cached; raises UserError if a check fails."""
    with spark_io.cached(parse_reports(lake.spec, source, raw, days)) as parsed:
        rows = mark_erased(lake, parsed) if isinstance(source, AudienceLabelSource) else parsed
        check_bad_row_rate(lake.spec, source.location_in(raw), rows)
        if isinstance(source, AuditSource):
            _check_reports(_stored_rows(rows), source.location_in(raw))
        yield rows


def _check_reports(rows: DataFrame, path: str) -> None:
    """Raise UserError if the shares of a report do not sum to 1, or its counts differ."""
    reports = rows.groupBy("day", "campaign").agg(
        F.sum("share").alias("total"),
        F.min("impressions").alias("least"),
        F.max("impressions").alias("most"),
    )
    is_off = (F.abs(F.col("total") - 1) > MAX_SHARE_ERROR) | (F.col("least") != F.col("most"))
    off = reports.filter(is_off).orderBy("day", "campaign").first()
    if off is None:
        return
    report = f"{path}: the report of campaign {off['campaign']} on {off['day']}"
    if off["least"] != off["most"]:
        raise UserError(
            f"{report} has counts from {off['least']:,} to {off['most']:,}: state the impressions "
            "of the whole report in each of its rows"
        )
    raise UserError(
        f"{report} has shares that sum to {off['total']:.3f}, not 1: report each class once, as a "
        "share from 0 to 1"
    )


def parse_reports(spec: DataSpec, source: Report, raw: str, days: DayRange) -> DataFrame:
    """Typed rows of a source, with the `reasons` why one is invalid, null if it is skipped."""
    columns: dict[str, str] = source.columns.model_dump(exclude_none=True)
    required = [column for name, column in columns.items() if name not in OPTIONAL_COLUMNS]
    rows = read_raw_records(source, RawSelection(raw, days), [*columns.values()], required)
    audience = [] if isinstance(source, SpendSource) else [F.lit(source.audience).alias("audience")]
    rows = rows.select(
        *audience,
        *[value.alias(name) for name, value in _typed_columns(spec, source).items()],
        F.col(PATH_DAY).alias("day"),
        *(PAYLOAD, SOURCE_FILE, RECORD_LOCATION, READ_ERROR, IS_SELECTED),
    )
    if isinstance(source, AudienceLabelSource):
        # A label that was delivered for an earlier time was not known before its landing day.
        rows = rows.withColumn("logged_valid_from", F.col("valid_from"))
        day_start = F.expr(f"{day_start_sql(spec)} * {MICROS['s']}")
        valid_from = F.when(F.col("valid_from").isNotNull(), F.greatest("valid_from", day_start))
        rows = rows.withColumn("valid_from", valid_from)
    violations = SCHEMAS[source.kind](spec).violations.items()
    reasons = [F.when(F.expr(condition), F.lit(reason)) for reason, condition in violations]
    rows = rows.withColumn("reasons", joined_reasons(reasons))
    rows = rows.withColumn(PAYLOAD, F.when(F.col("reasons") != "", F.col(PAYLOAD)))
    return rows.drop(IS_SELECTED)


def _typed_columns(spec: DataSpec, source: Report) -> Mapping[str, Column]:
    if isinstance(source, AuditSource):
        return {
            "campaign": raw_value(source.columns.campaign),
            "true_class": raw_value(source.columns.true_class),
            "share": raw_value(source.columns.share).try_cast("double"),
            "impressions": raw_value(source.columns.count).try_cast("bigint"),
        }
    if isinstance(source, SpendSource):
        return {
            "campaign": F.nullif(raw_value(source.columns.campaign), F.lit("")),
            "spend": raw_value(source.columns.spend).try_cast("double"),
            **_incremental_share(spec, source),
        }
    assert isinstance(source, AudienceLabelSource)
    label = F.nullif(raw_value(source.columns.label), F.lit(""))
    return {
        "provider": raw_value(source.columns.provider),
        "user_id": F.nullif(raw_value(source.columns.user), F.lit("")),
        "label": F.coalesce(label, F.lit(UNKNOWN_LABEL)),
        "valid_from": parse_time(spec, source.time_unit, raw_value(source.columns.valid_from)),
    }


def _incremental_share(spec: DataSpec, source: SpendSource) -> Mapping[str, Column]:
    """The share of a row where the table has them: null if it has none, NaN if it is no number."""
    if not roi_schemas.has_incremental_share(spec):
        return {}
    name = source.columns.incremental_share
    if name is None:
        return {"incremental_share": F.lit(None).cast("double")}
    logged = F.nullif(F.trim(raw_value(name)), F.lit(""))
    share = F.coalesce(logged.try_cast("double"), F.lit(float("nan")))
    return {"incremental_share": F.when(logged.isNotNull(), share)}
