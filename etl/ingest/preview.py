"""`gemline spec check`: previews the ingest of a sample of each source, without writing.

Records pass through the same readers and expressions as in the steps `ingest`,
`attributes` and `audience`.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date

from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from etl.attributes import parse_rows
from etl.errors import UserError
from etl.ingest.file_discovery import RawSelection
from etl.ingest.log_columns import logged_columns, read_log_records
from etl.ingest.normalize import REASON_SEPARATOR, normalize_events
from etl.ingest.readers import (
    PAYLOAD,
    READ_ERROR,
    RECORD_LOCATION,
    SOURCE_FILE,
    latest_day_with_records,
    translate_read_errors,
)
from etl.reports import Report, parse_reports
from etl.spec.label_delays import label_delay_warnings
from etl.spec.model import DataSpec
from etl.spec.sources import AttributeSource, Source
from etl.tables.lake import Lake
from etl.tables.schemas import NO_DAY

MAX_PAYLOAD_CHARS = 160


@dataclass(frozen=True)
class SourcePreview:
    """The result of ingesting the sampled records of a source."""

    source: str
    day: date | None  # of the files that were sampled
    records: int  # without skipped ones
    skipped: int = 0
    accepted: Counter[str] = field(default_factory=Counter)  # rows by event type and surface
    quarantined: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    example: dict[str, object] | None = None  # the first accepted row
    bad_examples: Sequence[tuple[str, str, str]] = ()  # reasons, file, payload
    columns: frozenset[str] = frozenset()  # that the spec names of a log
    found_columns: frozenset[str] = frozenset()  # those of them that a sampled record has
    error: str | None = None  # why the source cannot be read at all

    @property
    def bad_rate(self) -> float:
        """The share of the records that would be quarantined."""
        return self.quarantined / self.records if self.records else 0.0


def preview_sources(spec: DataSpec, raw: str, sample_size: int) -> Iterator[SourcePreview]:
    """A preview of each source, from up to `sample_size` records of its latest day."""
    for name, source in spec.sources.items():
        try:
            with translate_read_errors():
                preview = _preview(spec, name, source, raw, sample_size)
        except UserError as error:
            preview = SourcePreview(name, None, 0, error=str(error))
        yield preview


def _preview(
    spec: DataSpec, name: str, source: Source, raw: str, sample_size: int
) -> SourcePreview:
    day = latest_day_with_records(source, raw) if source.is_partitioned_by_day else None
    if source.is_partitioned_by_day and day is None:
        if source.optional:
            return SourcePreview(name, None, 0)
        raise UserError(f"{source.location_in(raw)}: no file of any day; check --raw and the path")
    days = (day or NO_DAY, day or NO_DAY)  # a source without a day in its path has the same files
    if isinstance(source, AttributeSource):
        rows = parse_rows(Lake(raw, spec), source, raw, days).limit(sample_size)
        return _summarize(name, day, rows.collect(), lambda _: f"version of {source.entity}")
    if isinstance(source, Report):
        rows = parse_reports(spec, source, raw, days).limit(sample_size)
        return _summarize(name, day, rows.collect(), lambda _: f"row of {source.kind}")
    columns = logged_columns(spec, source)
    records = read_log_records(spec, source, RawSelection(raw, days)).limit(sample_size)
    rows = normalize_events(spec, name, records, RECORD_LOCATION)
    types = {code: type_ for type_, code in spec.event_codes.items()}
    surfaces: dict[int | None, str] = {c: surface for surface, c in spec.surface_codes.items()}
    # These events are not looked up here: they may have landed on an earlier day.
    surfaces[None] = "the surface of what it belongs to"
    preview = _summarize(
        name, day, rows.collect(), lambda row: f"{types[row['type']]} on {surfaces[row['surface']]}"
    )
    found = _columns_with_values(records, columns)
    return replace(preview, columns=frozenset(columns), found_columns=found)


def _columns_with_values(records: DataFrame, columns: Iterable[str]) -> frozenset[str]:
    """The raw columns that are not null in all records."""
    names = sorted(set(columns))
    counts = records.agg(*[F.count(F.col("raw").getField(name)) for name in names]).first()
    return frozenset(name for name, count in zip(names, counts or (), strict=False) if count)


def _summarize(
    name: str, day: date | None, rows: Sequence[Row], kind_of: Callable[[Row], str]
) -> SourcePreview:
    rows, num_rows = [row for row in rows if row["reasons"] is not None], len(rows)
    accepted = [row for row in rows if not row["reasons"]]
    bad = [row for row in rows if row["reasons"]]
    return SourcePreview(
        source=name,
        day=day,
        records=len({(row[SOURCE_FILE], row[RECORD_LOCATION]) for row in rows}),
        skipped=num_rows - len(rows),
        accepted=Counter(map(kind_of, accepted)),
        quarantined=len(bad),
        reasons=Counter(reason for row in bad for reason in row["reasons"].split(REASON_SEPARATOR)),
        example=_shown_values(accepted[0]) if accepted else None,
        bad_examples=[(row["reasons"], row[SOURCE_FILE], row[PAYLOAD] or "") for row in bad[:3]],
    )


def _shown_values(row: Row) -> dict[str, object]:
    hidden = {PAYLOAD, RECORD_LOCATION, READ_ERROR, "reasons", "log"}
    values = row.asDict(recursive=True)
    return {name: v for name, v in values.items() if v is not None and name not in hidden}


def print_previews(spec: DataSpec, previews: Iterable[SourcePreview], console: Console) -> bool:
    """Print each preview; returns whether all sources can be ingested.

    A source cannot be ingested if it cannot be read, if its `where` skips every record, or if more
    than the spec's `max_bad_record_rate` of its records would be quarantined.
    """
    is_clean = True
    printed: list[SourcePreview] = []
    for preview in previews:
        printed.append(preview)
        console.rule(f"{preview.source}", align="left")
        if preview.error:
            console.print(f"[red]cannot be read:[/] {escape(preview.error)}")
            is_clean = False
            continue
        console.print(_summary(preview), highlight=False)
        if preview.example:
            example = json.dumps(preview.example, default=str, ensure_ascii=False)
            console.print(f"first accepted row: {escape(example)}", highlight=False)
        for reasons, file, payload in preview.bad_examples:
            console.print(
                f"quarantined: {escape(reasons)}\n  {escape(file)}: "
                f"{escape(payload[:MAX_PAYLOAD_CHARS])}",
                highlight=False,
            )
        if preview.skipped and not preview.records:
            console.print("[red]`where` skips every record: check the names of its columns[/]")
            is_clean = False
        if preview.bad_rate > spec.max_bad_record_rate:
            console.print(
                f"[red]{preview.bad_rate:.0%} would be quarantined; the limit is "
                f"{spec.max_bad_record_rate:.0%}: a day like this would be refused[/]"
            )
            is_clean = False
    if missing := columns_without_values(printed):
        names = escape(", ".join(missing))
        console.print(f"[yellow]no sampled record has {names}: check the names in the spec[/]")
    for text in label_delay_warnings(spec):
        console.print(f"[yellow]{text}[/]")
    return is_clean


def columns_without_values(previews: Iterable[SourcePreview]) -> list[str]:
    """The columns that the spec names and that no sampled record of any log has.

    The column of an attribute may be missing in some logs.
    """
    named, found = frozenset[str](), frozenset[str]()
    for preview in previews:
        named |= preview.columns if preview.records else frozenset()
        found |= preview.found_columns
    return sorted(named - found)


def _summary(preview: SourcePreview) -> Table:
    table = Table("records", "become", "rows", box=None, title_justify="left")
    day = f" of {preview.day}" if preview.day else ""
    records = f"{preview.records:,}{day}"
    for kind, count in preview.accepted.most_common():
        table.add_row(records, kind, f"{count:,}")
        records = ""
    for reason, count in preview.reasons.most_common():
        table.add_row(records, f"quarantine: {escape(reason)}", f"{count:,}")
        records = ""
    if preview.skipped:
        table.add_row(records, "skipped by `where`", f"{preview.skipped:,}")
        records = ""
    if records:
        table.add_row(records, "no records", "")
    return table
