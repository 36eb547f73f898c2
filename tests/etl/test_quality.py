"""Laws of what an ingest refuses: columns that no log has, and logs or surfaces that are bad."""

import json
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from etl.errors import UserError
from etl.ingest import ingest
from etl.parked import park
from etl.tables.lake import Lake
from tests.etl.shop import shop_lake
from tests.pipeline import rows

pytestmark = pytest.mark.spark

ONE, TWO = date(2026, 1, 1), date(2026, 1, 2)


@pytest.fixture
def own(spark: SparkSession, tmp_path: Path) -> Lake:
    return shop_lake(tmp_path)


def records(day: date, n: int, **values: object) -> Iterator[dict[str, Any]]:
    start = (day - date(1970, 1, 1)).days * 86_400
    for i in range(n):
        row = {"id": f"{day}-{i}", "who": f"u{i % 7}", "what": "shoe", "page": "home"}
        yield row | {"action": "shown", "at": start + i, "phone": "ios"} | values


def write(own: Lake, log: str, day: date, *parts: Iterator[dict[str, Any]]) -> str:
    raw = Path(own.root).with_name("raw")
    (raw / log).mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for part in parts for record in part)
    (raw / log / f"{day}.json").write_text(lines)
    return str(raw)


def test_a_sparse_log_without_records_lacks_nothing(own: Lake) -> None:
    raw = write(own, "app", ONE, records(ONE, 200))
    assert ingest(own, raw, (ONE, ONE))["kept"] == 200
    write(own, "sales", TWO, records(TWO, 3))  # none names its impression
    write(own, "app", TWO, records(TWO, 200))
    assert ingest(own, raw, (TWO, TWO))["kept"] == 203


def test_a_column_may_begin_on_a_later_day(own: Lake) -> None:
    raw = write(own, "app", ONE, records(ONE, 200, phone=None))
    with pytest.raises(UserError, match="the spec names column phone, but no record of log app"):
        ingest(own, raw, (ONE, ONE))
    write(own, "app", TWO, records(TWO, 200))
    assert ingest(own, raw, (ONE, ONE))["kept"] == 200


@pytest.mark.parametrize(
    ("log", "bad", "sentence"),
    [
        ("sales", {"at": "noon"}, "120 of 120 records of log sales of 2026-01-01 are bad"),
        (
            "app",
            {"page": "search", "who": ""},
            "120 of 120 records of log app on surface search of 2026-01-01",
        ),
    ],
)
def test_a_bad_log_or_surface_does_not_hide_in_a_good_day(
    own: Lake, log: str, bad: dict[str, object], sentence: str
) -> None:
    good = records(ONE, 2000)
    parts = [good, records(ONE, 120, **bad)] if log == "app" else [good]
    raw = write(own, "app", ONE, *parts)
    if log == "sales":
        write(own, "sales", ONE, records(ONE, 120, imp="i", **bad))
    with pytest.raises(UserError, match=sentence):
        ingest(own, raw, (ONE, ONE))
    assert not own.exists("events")


@pytest.mark.parametrize("shared", [False, True])
def test_ids_are_those_of_one_log_unless_the_spec_shares_them(own: Lake, shared: bool) -> None:
    spec = own.spec.model_copy(update={"shared_event_ids": shared})
    lake = Lake(own.root, spec)
    raw = write(own, "app", ONE, records(ONE, 3, action="click"), records(ONE, 1, action="click"))
    write(own, "sales", ONE, records(ONE, 2))
    assert ingest(lake, raw, (ONE, ONE))["duplicates"] == (3 if shared else 1)
    again = {(row["log"], row["event_id"]) for row in rows(lake, "events")}
    assert len(again) == len(rows(lake, "events")) == (3 if shared else 5)


def test_a_bot_farm_does_not_grow_the_plan(own: Lake, spark: SparkSession) -> None:
    spec = own.spec.model_copy(update={"most_events_a_day": 2})
    fresh = spark.range(6000).selectExpr(
        f"DATE '{ONE}' AS day",
        "CONCAT('bot', id % 2000) AS user_id",
        "id AS visible_ts",
        "id AS event_ts",
        "CAST(id AS STRING) AS event_id",
    )
    kept, parked = park(spec, fresh, fresh.limit(0))
    assert (kept.count(), parked.count()) == (4000, 2000)
    assert kept.agg(F.max("visible_ts")).first()[0] == 3999, "the first of the day are kept"
    assert "bot1999" not in kept._jdf.queryExecution().analyzed().toJSON()


def test_a_record_that_is_not_accounted_for_stops_before_anything_is_written(
    own: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = write(own, "app", ONE, records(ONE, 200))
    # A defect in any part would lose a record between what was read and what is written.
    monkeypatch.setattr("etl.ingest.read_by_day", lambda groups: {ONE: 201})
    with pytest.raises(AssertionError, match=r"201 records were read, .*'kept': 200"):
        ingest(own, raw, (ONE, ONE))
    assert not any(own.exists(table) for table in ("events", "quarantine", "parked", "flow"))
