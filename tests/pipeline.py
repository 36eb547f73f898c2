"""The data steps in one process, and the rows that they write."""

from pathlib import Path
from typing import Any

from etl.attributes import load_attributes
from etl.ingest.run import ingest
from etl.labels import label_impressions
from etl.reports import AUDIENCE_REPORTS, load_reports
from etl.spec.units import DayRange
from etl.tables.lake import Lake
from features.audience.counts import count_audiences
from features.examples import build_examples
from features.history.build import build_history
from features.items import index_items

TABLES = (
    "events", "excluded_events", "quarantine", "ingest_metrics", "attributes_user",
    "attributes_item", "attributes_user_snapshots", "attributes_item_snapshots", "impressions",
    "items", "item_versions", "first_item_versions", "history", "user_event_counts", "examples",
)  # fmt: skip


def build_tables(
    lake: Lake, raw: Path, days: DayRange, data_until: int | None = None
) -> dict[str, int]:
    """All tables from raw logs to examples; returns the counts of the ingest.

    `data_until` is the epoch second until which events have landed, if the last day is not over.
    """
    counts = ingest(lake, str(raw), days)
    load_attributes(lake, str(raw), days)
    label_impressions(lake, days, data_until)
    for step in (index_items, build_history, build_examples):
        step(lake, days)
    return counts


def build_audiences(lake: Lake, raw: Path, days: DayRange) -> None:
    """The tables of labels, audits and counts; events and attributes exist already."""
    load_reports(lake, str(raw), days, AUDIENCE_REPORTS)
    count_audiences(lake, days)


def rows(lake: Lake, name: str) -> list[dict[str, Any]]:
    """All rows of a table without its versions, in the same order for equal tables."""
    from etl.tables import schemas
    from etl.tables.arrow import snapshot

    schema = schemas.table_schema(lake.spec, name)
    table = snapshot(lake, schema).read().to_pylist()
    for row in table:
        row.pop("history_version", None)
        row.pop("source_file", None)
    return sorted(table, key=repr)
