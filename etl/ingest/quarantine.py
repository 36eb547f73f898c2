"""Data quality of an ingest: checks before any write, and the quarantine of invalid records.

The checks refuse days with too many bad records, and columns of the spec without values.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from rich.console import Console
from rich.table import Table
from rich.text import Text

from etl.errors import UserError
from etl.ingest.file_discovery import RawSelection
from etl.ingest.named_events import NO_TOUCH, UNKNOWN_EVENT
from etl.ingest.normalize import REASON_SEPARATOR, read_log
from etl.ingest.readers import latest_day_with_records
from etl.spec.model import DataSpec
from etl.spec.sources import EventLogSource, ImpressionLogSource
from etl.spec.units import DayRange, date_range
from etl.tables import schemas, spark_io
from etl.tables.arrow import snapshot
from etl.tables.declared_columns import logged_context_attributes
from etl.tables.lake import Lake
from etl.tables.schemas import NO_DAY

# A log or a surface with fewer records on a day is not checked separately.
MIN_RECORDS_TO_CHECK = 100


@dataclass(frozen=True)
class RecordGroup:
    """Counts of the records of one landing day, log and surface (None if unknown)."""

    day: date | None
    log: str
    surface: int | None
    num_records: int
    num_valid: int
    num_impressions: int  # valid ones
    non_null_counts: Mapping[str, int]  # of valid records, by optional column
    reason_counts: Mapping[str, int]  # of invalid records

    @property
    def num_unmatched(self) -> int:
        """Records that are not bad, but belong to no event that is known."""
        return sum(self.reason_counts.get(reason, 0) for reason in (UNKNOWN_EVENT, NO_TOUCH))


def count_record_groups(spec: DataSpec, records: DataFrame) -> list[RecordGroup]:
    """Count normalized records, none of them skipped, by landing day, log and surface."""
    is_valid, keys = F.col("reasons") == "", ("day", "log", "surface")
    is_impression = F.col("type") == spec.event_codes[spec.impression_type]
    columns = sorted(
        {name for log in spec.log_sources.values() for name in optional_columns(spec, log)}
    )
    counts = records.groupBy(*keys).agg(
        F.count("*").alias("num_records"),
        F.count_if(is_valid).alias("num_valid"),
        F.count_if(is_valid & is_impression).alias("num_impressions"),
        *[F.count(F.when(is_valid, F.col(name))).alias(name) for name in columns],
    )
    reason = F.explode(F.split("reasons", REASON_SEPARATOR)).alias("reason")
    reasons = records.filter(~is_valid).select(*keys, reason).groupBy(*keys, "reason").count()
    reason_counts: dict[tuple[object, ...], dict[str, int]] = {}
    for row in reasons.collect():
        group = tuple(row[key] for key in keys)
        reason_counts.setdefault(group, {})[row["reason"]] = row["count"]
    return [
        RecordGroup(
            day=row["day"],
            log=row["log"],
            surface=row["surface"],
            num_records=row["num_records"],
            num_valid=row["num_valid"],
            num_impressions=row["num_impressions"],
            non_null_counts={name: row[name] for name in columns},
            reason_counts=reason_counts.get(tuple(row[key] for key in keys), {}),
        )
        for row in counts.collect()
    ]


def records_by_day(groups: Iterable[RecordGroup]) -> dict[date | None, int]:
    """Number of records by landing day."""
    counts = Counter[date | None]()
    for group in groups:
        counts[group.day] += group.num_records
    return dict(counts)


def check_bad_record_rate(
    spec: DataSpec, groups: Iterable[RecordGroup], selection: RawSelection
) -> None:
    """Raise UserError if a day has too many bad records, or no valid events where it needs some.

    `max_bad_record_rate` applies to all records of a day, to those of each log, and to those of
    each log and surface. Records that name an unknown event are not bad: a log of conversions may
    hold those of other channels.
    """
    groups = list(groups)
    for day in date_range(*selection.days):
        of_day = [group for group in groups if group.day == day]
        if not sum(group.num_valid for group in of_day) and not selection.allow_empty_days:
            reasons = _format_reasons(of_day)
            detail = f" (quarantined: {reasons})" if reasons else ""
            filters = any(log.where for log in spec.log_sources.values())
            check = "--days, and `where` of the sources" if filters else "--days"
            raise UserError(
                f"no events of {day} in {selection.root}{detail}; check {check} (or pass "
                "--allow-empty-days if there were none)"
            )
        _check_group_rate(spec, of_day, f"of {day}")
        for log in sorted({group.log for group in of_day}):
            of_log = [group for group in of_day if group.log == log]
            _check_group_rate(spec, of_log, f"of log {log} of {day}", MIN_RECORDS_TO_CHECK)
            unmatched = sum(group.num_unmatched for group in of_log)
            if unmatched >= MIN_RECORDS_TO_CHECK and not any(g.num_valid for g in of_log):
                text = "log %s of %s: none of %d records belongs to a known event"
                logging.warning(text, log, day, unmatched)
            for surface, code in spec.surface_codes.items():
                of_surface = [group for group in of_log if group.surface == code]
                description = f"of log {log} on surface {surface} of {day}"
                _check_group_rate(spec, of_surface, description, MIN_RECORDS_TO_CHECK)


def check_bad_row_rate(spec: DataSpec, path: str, rows: DataFrame) -> None:
    """Raise UserError if too many rows of a day have `reasons`, in files without events."""
    num_bad = F.count_if(F.expr("reasons != ''")).alias("num_bad")
    by_day = rows.groupBy("day").agg(
        F.count("*").alias("num_read"), F.count("reasons").alias("num_rows"), num_bad
    )
    days = by_day.orderBy("day").collect()
    if days and not any(counts["num_rows"] for counts in days):
        num_read = sum(counts["num_read"] for counts in days)
        logging.warning("all %d rows of %s are skipped", num_read, path)
    for counts in days:
        if counts["num_bad"] <= spec.max_bad_record_rate * counts["num_rows"]:
            continue
        bad = rows.filter("reasons != ''").filter(F.col("day").eqNullSafe(F.lit(counts["day"])))
        by_reason = bad.groupBy("reasons").count()
        most_frequent = by_reason.orderBy(F.desc("count")).take(5)
        reasons = "; ".join(f"{row['reasons']}: {row['count']:,}" for row in most_frequent)
        of_day = f" of {counts['day']}" if len(days) > 1 else ""
        raise UserError(
            f"{counts['num_bad']:,} of {counts['num_rows']:,} rows of {path}{of_day} are bad "
            f"({reasons}); the limit is {spec.max_bad_record_rate:.0%}: correct the spec or "
            "the file, or raise max_bad_record_rate in the spec"
        )


def _check_group_rate(
    spec: DataSpec, groups: list[RecordGroup], description: str, min_records: int = 0
) -> None:
    total = sum(group.num_records for group in groups)
    bad = total - sum(group.num_valid + group.num_unmatched for group in groups)
    if total >= min_records and bad > spec.max_bad_record_rate * total:
        raise UserError(
            f"{bad:,} of {total:,} records {description} are bad ({_format_reasons(groups)}); the "
            f"limit is {spec.max_bad_record_rate:.0%}: correct the spec or the log, or raise "
            "max_bad_record_rate in the spec"
        )


def _format_reasons(groups: Iterable[RecordGroup]) -> str:
    reasons = Counter[str]()
    for group in groups:
        reasons.update(group.reason_counts)
    return "; ".join(f"{reason}: {count:,}" for reason, count in reasons.most_common())


def check_declared_columns(
    spec: DataSpec, groups: Iterable[RecordGroup], selection: RawSelection
) -> None:
    """Raise UserError if the spec names a column that has no values in a log.

    A column without values in few records, or on the selected days but not in the log's latest
    files, only causes a warning. A log without records is not checked.
    """
    groups = list(groups)
    for name, log in spec.log_sources.items():
        if log.where and not any(group.log == name for group in groups):
            logging.warning("log %s: no record satisfies its `where`, or it is empty", name)
        unused = _columns_without_values(spec, name, groups)
        missing = {column for column, records in unused.items() if records >= MIN_RECORDS_TO_CHECK}
        if missing:
            missing &= _columns_missing_in_latest_files(spec, name, selection)
        if missing:
            raise UserError(
                f"the spec names column {min(missing)}, but no record of log {name} in "
                f"{selection.root} has it; correct the spec, or remove the column from it"
            )
        for column, records in unused.items():
            logging.warning("log %s: none of %d records has column %s", name, records, column)


def _columns_without_values(
    spec: DataSpec, log_name: str, groups: Iterable[RecordGroup]
) -> dict[str, int]:
    """Raw columns of a log that are null in all valid records, with the number of these."""
    of_log = [group for group in groups if group.log == log_name]
    unused = {}
    for name, raw_column in optional_columns(spec, spec.log_sources[log_name]).items():
        if name in ("logged_impression_id", "logged_touch_id"):
            records = sum(group.num_valid for group in of_log)
        else:
            records = sum(group.num_impressions for group in of_log)
        if records and not any(group.non_null_counts[name] for group in of_log):
            unused[raw_column] = records
    return unused


def _columns_missing_in_latest_files(
    spec: DataSpec, log_name: str, selection: RawSelection
) -> set[str]:
    """Raw columns without values also in a log's files of a later day; all without such files."""
    log = spec.log_sources[log_name]
    all_columns = set(optional_columns(spec, log).values())
    latest = latest_day_with_records(log, selection.root) if log.is_partitioned_by_day else None
    if latest is None or latest <= selection.days[1]:
        return all_columns
    records = read_log(spec, log_name, replace(selection, days=(latest, latest)))
    groups = count_record_groups(spec, records.filter("reasons IS NOT NULL"))
    return set(_columns_without_values(spec, log_name, groups))


def optional_columns(spec: DataSpec, log: EventLogSource | ImpressionLogSource) -> dict[str, str]:
    """Raw columns that a log must have because the spec names them, by normalized name.

    Any event may name its impression or a touch; the others belong to impressions. Dwell and value
    are not among them: a day may have no event of the types that have them.
    """
    c = log.columns
    columns = {
        f"ctx_{name}": attribute.column or name
        for name, attribute in logged_context_attributes(spec).items()
    }
    named = {
        "request_id": c.request,
        "position": c.position,
        "propensity": c.propensity,
        "logged_impression_id": c.impression,
        "logged_touch_id": c.touch,
    }
    return columns | {name: column for name, column in named.items() if column}


MAX_PAYLOAD_CHARS = 300  # shown in the report


def write_quarantine(lake: Lake, logs: Collection[str], invalid: DataFrame, days: DayRange) -> None:
    """Replace the quarantined records of some sources on a range of days.

    Args:
        lake: The lake to write to.
        logs: Names of the sources whose records are replaced.
        invalid: Records whose `reasons` are joined by `REASON_SEPARATOR`.
        days: First and last landing day; records without one are replaced, too.
    """
    rows = invalid.withColumn("reasons", F.array_distinct(F.split("reasons", REASON_SEPARATOR)))
    rows = rows.withColumn("day", F.coalesce("day", F.lit(NO_DAY)))
    names = ", ".join(f"'{name}'" for name in logs)
    where = f"({landing_day_predicate(days)}) AND log IN ({names})"
    spark_io.replace_partitions(lake, schemas.quarantine(lake.spec), rows, where, {})


def landing_day_predicate(days: DayRange) -> str:
    """SQL for a range of landing days plus `NO_DAY`, which every run replaces."""
    return f"{spark_io.day_range_predicate(*days)} OR day = '{NO_DAY}'"


@dataclass
class QuarantinedReason:
    """The quarantined records that have a reason, of which a few are kept as examples."""

    num_records: int = 0
    days: list[date] = field(default_factory=list)
    files: set[str] = field(default_factory=set)
    examples: list[dict[str, object]] = field(default_factory=list)

    def add_day(self, day: date, rows: pa.Table, num_examples: int) -> None:
        """Add the records of a day."""
        self.num_records += len(rows)
        self.days.append(day)
        self.files.update(rows["source_file"].unique().to_pylist())
        self.examples += rows.slice(0, num_examples - len(self.examples)).to_pylist()


def quarantine_report(lake: Lake, days: DayRange, num_examples: int, console: Console) -> None:
    """Print the reasons, the most frequent first, with counts, days, files and examples."""
    by_reason = read_quarantined_reasons(lake, days, num_examples)
    most_frequent = sorted(by_reason.items(), key=lambda item: -item[1].num_records)
    summary = Table("reason", "records", "days", "files", title=f"quarantine of {lake.root}")
    for reason, of_reason in most_frequent:
        numbers = f"{of_reason.num_records:,}", _format_days(of_reason.days)
        summary.add_row(Text(reason), *numbers, f"{len(of_reason.files):,}")
    console.print(summary)
    for reason, of_reason in most_frequent:
        console.print(Text(f"\n{reason}", style="bold"))
        for row in of_reason.examples:
            _print_record(row, console)


def read_quarantined_reasons(
    lake: Lake, days: DayRange, num_examples: int
) -> dict[str, QuarantinedReason]:
    """The reasons of the quarantined records on some days; payloads are read a day at a time."""
    table = snapshot(lake, schemas.quarantine(lake.spec))
    by_reason: dict[str, QuarantinedReason] = defaultdict(QuarantinedReason)
    for day in table.days():
        if not (days[0] <= day <= days[1] or day == NO_DAY):
            continue
        rows = table.read(day=day)
        reasons = rows["reasons"].combine_chunks()
        row_of_reason, reasons = pc.list_parent_indices(reasons), pc.list_flatten(reasons)
        for reason in pc.unique(reasons).to_pylist():
            of_reason = rows.take(row_of_reason.filter(pc.equal(reasons, reason)))
            by_reason[reason].add_day(day, of_reason, num_examples)
    return by_reason


def _format_days(days: list[date]) -> str:
    names = sorted("unknown" if day == NO_DAY else str(day) for day in days)
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"


def _print_record(row: dict[str, object], console: Console) -> None:
    line = f":{row['line']}" if row["line"] else ""
    payload = str(row["payload"] or "(the whole file)")
    console.print(Text(f"  {row['source_file']}{line}"), soft_wrap=True)
    console.print(Text(f"    {payload[:MAX_PAYLOAD_CHARS]}"))
