"""The data steps in one process, for tests."""

from datetime import date
from pathlib import Path

from etl.attributes import load_attributes
from etl.ingest import ingest
from etl.labels import label
from etl.tables.lake import Lake
from features.examples import build_examples
from features.history.build import build_history
from features.items import index_items

TABLES = (
    "events", "parked", "quarantine", "flow", "impressions", "items", "item_versions", "history",
    "examples",
)  # fmt: skip


def build_tables(lake: Lake, raw: Path, days: tuple[date, date]) -> dict[str, int]:
    """Raw logs to examples; returns what flowed."""
    flow = ingest(lake, str(raw), days)
    load_attributes(lake, str(raw), days)
    for step in (label, index_items, build_history, build_examples):
        step(lake, days)
    return flow


def rows(lake: Lake, name: str) -> list[dict[str, object]]:
    """All rows of a table but its versions, in an order of their own: equal tables, equal lists."""
    from etl.tables import contracts
    from etl.tables.arrow import snapshot

    contract = getattr(contracts, name)(lake.spec)
    table = snapshot(lake, contract).read().to_pylist()
    for row in table:
        row.pop("history_version", None)
        row.pop("source_file", None)
    return sorted(table, key=repr)
