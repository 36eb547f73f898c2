"""Copies of events are dropped, in whatever runs the days are ingested."""

import json
from datetime import date, timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from etl.erasure.tables import adjust_pointers
from etl.errors import UserError
from etl.ingest.run import ingest
from etl.spec import load_spec
from etl.spec.units import DAY
from etl.tables.lake import Lake
from tests.pipeline import build_tables, rows

pytestmark = pytest.mark.spark

DAY_1 = date(2026, 1, 1)
LATENESS_DAYS = 3
SPEC = f"""
name: copies
buckets: 1
allowed_lateness: {LATENESS_DAYS}d
surfaces: {{home: {{}}}}
events:
  shown: {{role: impression}}
  purchase: {{role: outcome}}
objectives: {{purchase: {{event: purchase, window: 3d, label_grace_period: 1h}}}}
sequences: {{behaviour: {{}}}}
counters: {{windows: [1d], events: [shown], keys: [[user]]}}
sources:
  log:
    kind: impression_log
    format: json
    path: log/{{day}}.json
    time_unit: s
    columns: {{event_id: id, user: who, item: what, surface: page, event_time: at}}
    outcomes: [{{event: purchase, indicator: bought, delay: after}}]
"""


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    (tmp_path / "spec.yaml").write_text(SPEC)
    return Lake(str(tmp_path / "lake"), load_spec(tmp_path / "spec.yaml"))


def write_log(raw: Path, day: date, records: list[dict[str, object]]) -> None:
    (raw / "log").mkdir(parents=True, exist_ok=True)
    text = "\n".join(json.dumps(record) for record in records)
    (raw / "log" / f"{day}.json").write_text(text + "\n")


def impression(
    lake: Lake, day: date, name: str, bought_after: int | None = None
) -> dict[str, object]:
    """A record of the morning of a day; a purchase follows it after some seconds."""
    at = lake.spec.day_start(day) + 9 * 3600
    record = {"id": name, "who": "user-1", "what": "item-1", "page": "home", "at": at}
    return record | {"bought": bought_after is not None, "after": bought_after or 0}


def day_after(number: int) -> date:
    return DAY_1 + timedelta(days=number)


@pytest.mark.parametrize("days_later", [1, 5, 6, 7])
def test_an_outcome_counts_once_however_much_later_its_record_is_delivered_again(
    spark: SparkSession, lake: Lake, tmp_path: Path, days_later: int
) -> None:
    raw, last = tmp_path / "raw", day_after(days_later)
    bought = impression(lake, DAY_1, "bought", LATENESS_DAYS * DAY)
    write_log(raw, DAY_1, [bought])
    for number in range(1, days_later + 1):
        day = day_after(number)
        write_log(raw, day, [impression(lake, day, f"of {day}")])
    write_log(raw, last, [impression(lake, last, f"of {last}"), bought])
    for days in ((DAY_1, day_after(days_later - 1)), (last, last)):
        ingest(lake, str(raw), days)
    purchases = [row for row in rows(lake, "events") if row["event_id"].startswith("bought:")]
    assert len(purchases) == 1


def test_a_day_of_which_no_event_is_kept_is_ingested(
    spark: SparkSession, lake: Lake, tmp_path: Path
) -> None:
    """Its log delivers the one of the day before again: all steps of the next day can run."""
    raw, days = tmp_path / "raw", [day_after(number) for number in range(3)]
    for day, delivered in zip(days, (days[0], days[0], days[2]), strict=True):
        write_log(raw, day, [impression(lake, delivered, f"of {delivered}")])
    for day in days:
        build_tables(lake, raw, (day, day), data_until=lake.spec.day_end(day))
    for name in ("events", "impressions", "examples"):
        assert {row["day"] for row in rows(lake, name)} == {days[0], days[2]}
    kept = {row["day"]: row["kept"] for row in rows(lake, "ingest_metrics")}
    assert kept == dict(zip(days, (1, 0, 1), strict=True))


def test_a_day_without_events_is_ingested_only_on_request(
    spark: SparkSession, lake: Lake, tmp_path: Path
) -> None:
    raw, days = tmp_path / "raw", [day_after(number) for number in range(3)]
    for day in (days[0], days[2]):
        write_log(raw, day, [impression(lake, day, f"of {day}")])
    ingest(lake, str(raw), (days[0], days[0]))
    without_log = Lake(lake.root, lake.spec.allow_missing_sources(["log"]))
    with pytest.raises(UserError, match=f"no events of {days[1]} .*--allow-empty-days"):
        ingest(without_log, str(raw), (days[1], days[1]))
    with pytest.raises(UserError, match="have not been ingested"):
        ingest(lake, str(raw), (days[2], days[2]))
    ingest(without_log, str(raw), (days[1], days[1]), allow_empty_days=True)
    ingest(lake, str(raw), (days[2], days[2]))
    kept = {row["day"]: row["kept"] for row in rows(lake, "ingest_metrics")}
    assert kept == dict(zip(days, (1, 0, 1), strict=True))


def test_an_id_that_is_logged_again_days_later_is_an_event_of_both_days_for_any_split_of_days(
    spark: SparkSession, lake: Lake, tmp_path: Path
) -> None:
    """On the third day it is a copy; on the fifth, the first one is too old to have copies."""
    raw, num_days = tmp_path / "raw", 5
    for number in range(num_days):
        day = day_after(number)
        names = ("a", "b", "c")[: 2 + number // 4]
        shown = [impression(lake, day, f"{name} of {day}") for name in names]
        again = [impression(lake, day, "again") | {"at": lake.spec.day_start(day) + 10 * 3600}]
        write_log(raw, day, shown + again[: 1 - number % 2])
    by_day = Lake(str(tmp_path / "by day"), lake.spec)
    for number in range(num_days):
        ingest(by_day, str(raw), (day_after(number), day_after(number)))
    build_tables(lake, raw, (day_after(0), day_after(num_days - 1)))
    assert rows(lake, "events") == rows(by_day, "events")
    found = [row for row in rows(lake, "examples") if row["impression_id"] == "again"]
    counts = {row["day"]: row["cnt_user_shown_1d"] for row in found}
    assert counts == {day_after(0): 2, day_after(4): 3}
    before = rows(lake, "examples")
    adjust_pointers(lake, spark.createDataFrame([("user-1",)], "user_id string"))
    assert rows(lake, "examples") == before, "pointers of both are right"
