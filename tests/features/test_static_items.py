"""Static attributes of items: rows that are added to their file later are read from then on."""

import json
from datetime import date, timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from etl.attributes import load_attributes
from etl.ingest.run import ingest
from etl.labels import label_impressions
from etl.spec import load_spec
from etl.spec.units import DayRange
from etl.tables.lake import Lake
from features.examples import build_examples
from features.history.build import build_history
from features.items import index_items
from ranking.feature_store.consistency import check_consistency
from ranking.feature_store.materialize import HistoryLengths, build_feature_store
from ranking.student.config import InputLimits
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


VERSIONED = SPEC.replace("static: true}", "static: true, valid_from: since, time_unit: s}")
OLD = [date(2020, 1, 1), date(2021, 1, 1), date(2022, 1, 1)]
READ = [OLD[0], OLD[2]]  # counters read the first, requests the last one before the item was seen
PLANNED, APPENDED = DAYS[3], [date(2019, 1, 1), DAYS[1]]


def write_versions(raw: Path, lake: Lake, days: list[date]) -> None:
    """A file of versions of `a`, each valid from the morning of a day."""
    lines = [
        json.dumps({"what": "a", "kind": f"{day}", "since": lake.spec.day_start(day) + 3600})
        for day in days
    ]
    (raw / "items.json").write_text("\n".join(lines) + "\n")


def versions_of(lake: Lake) -> dict[date, dict[str, object]]:
    """The rows of `item_versions` by the day from which they are valid."""
    stored = rows(lake, "item_versions")
    by_day = {lake.spec.day_of(row["valid_from"] // 10**6): row for row in stored}
    assert len(by_day) == len(stored)
    return by_day


def build_items(lake: Lake, raw: Path, days: DayRange) -> None:
    ingest(lake, str(raw), days)
    load_attributes(lake, str(raw), days)
    index_items(lake, days)


@pytest.fixture(scope="module")
def extended(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """A lake of an item whose file has two more versions from the third day on."""
    folder = tmp_path_factory.mktemp("extended")
    (folder / "spec.yaml").write_text(VERSIONED)
    lake, raw = Lake(str(folder / "lake"), load_spec(folder / "spec.yaml")), folder / "raw"
    for day in DAYS:
        write_day(raw, lake, day, ["a"])
    write_versions(raw, lake, [*OLD, PLANNED])
    for day in DAYS[:2]:
        build_items(lake, raw, (day, day))
    write_versions(raw, lake, [*OLD, PLANNED, *APPENDED])
    for day in (DAYS[2], DAYS[2], DAYS[3]):  # one is built again
        build_items(lake, raw, (day, day))
    return lake


def test_versions_of_an_item_that_has_been_seen_are_read_from_the_day_on_which_they_are_added(
    extended: Lake,
) -> None:
    """Wherever they belong among the stored ones; no other moves."""
    days = {since: row["day"] for since, row in versions_of(extended).items()}
    assert days == dict.fromkeys([*READ, PLANNED], DAYS[0]) | dict.fromkeys(APPENDED, DAYS[2])


def test_requests_read_the_versions_of_the_tables_after_some_are_added(
    extended: Lake, tmp_path: Path
) -> None:
    for step in (label_impressions, build_history, build_examples):
        step(extended, (DAYS[0], DAYS[3]))
    end = extended.spec.day_start(DAYS[2])
    store = build_feature_store(extended, tmp_path / "store", end, HistoryLengths("behaviour", 8))
    limits = InputLimits(
        max_length=8, encoded_events=8, teacher_history_length=0, user_hash_buckets=0
    )
    report = check_consistency(store, extended, DAYS[2], limits)
    store.close()
    assert report.num_requests and not report.mismatches


def test_all_days_at_once_have_the_versions_of_days_one_by_one(
    extended: Lake, tmp_path: Path
) -> None:
    """Each is valid from the same time, so that examples read the same ones.

    The former first version is no longer read: it was superseded before its item was seen.
    """
    at_once = Lake(str(tmp_path / "lake"), extended.spec)
    build_items(at_once, Path(extended.root).parent / "raw", (DAYS[0], DAYS[3]))
    found, expected = versions_of(at_once), versions_of(extended)
    del expected[OLD[0]]
    for version in (*found.values(), *expected.values()):
        del version["day"]
    assert found == expected
