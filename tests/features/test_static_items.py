"""Static attributes of items: rows that are added to their file later are read from then on."""

import json
from datetime import date, timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from etl.spec import load_spec
from etl.tables.lake import Lake
from tests.pipeline import build_tables, rows

pytestmark = pytest.mark.spark

DAYS = [date(2026, 1, 1) + timedelta(days=number) for number in range(4)]
SPEC = """
name: static
buckets: 1
surfaces: {home: {}}
events:
  shown: {role: impression}
  click: {role: outcome}
objectives: {click: {event: click, window: 1h, label_grace_period: 1h}}
attributes: {item: {kind: {type: categorical}}}
sequences: {behaviour: {}}
counters: {windows: [1d], events: [shown], keys: [[kind]]}
sources:
  log:
    kind: event_log
    format: json
    path: log/{day}.json
    time_unit: s
    columns: {event_id: id, user: who, item: what, surface: page, type: action, event_time: at,
              ingest_time: at}
  items: {kind: attributes, entity: item, format: json, path: items.json, key: what, static: true}
"""


def write_day(raw: Path, lake: Lake, day: date, items: list[str]) -> None:
    """A log in which each item is shown at noon."""
    at = lake.spec.day_start(day) + 12 * 3600
    event = {"who": "u", "page": "home", "action": "shown", "at": at}
    lines = [json.dumps(event | {"id": f"{day} {item}", "what": item}) for item in items]
    (raw / "log").mkdir(parents=True, exist_ok=True)
    (raw / "log" / f"{day}.json").write_text("\n".join(lines) + "\n")


def write_items(raw: Path, items: list[str]) -> None:
    lines = [json.dumps({"what": item, "kind": f"kind of {item}"}) for item in items]
    (raw / "items.json").write_text("\n".join(lines) + "\n")


def test_attributes_of_an_item_that_has_been_seen_are_read_from_the_day_on_which_they_are_added(
    spark: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    lake, raw = Lake(str(tmp_path / "lake"), load_spec(tmp_path / "spec.yaml")), tmp_path / "raw"
    for day in DAYS:
        write_day(raw, lake, day, ["a", "b"])
    write_items(raw, ["a"])
    for day in DAYS[:2]:
        build_tables(lake, raw, (day, day))
    index = {row["item_id"]: row["item_index"] for row in rows(lake, "items")}
    assert {row["item_index"] for row in rows(lake, "item_versions")} == {index["a"]}
    write_items(raw, ["a", "b"])
    for day in (DAYS[2], DAYS[2], DAYS[3]):  # one is built again
        build_tables(lake, raw, (day, day))
    for name in ("item_versions", "first_item_versions"):
        days = {row["item_index"]: row["day"] for row in rows(lake, name)}
        assert days == {index["a"]: DAYS[0], index["b"]: DAYS[2]}, name
        assert len(rows(lake, name)) == 2, name
