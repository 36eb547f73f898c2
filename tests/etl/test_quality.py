"""Data-quality checks of an ingest: missing columns, bad logs and surfaces, and lost records."""

import gzip
import json
import random
from collections import defaultdict
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from etl.errors import UserError
from etl.ingest.file_discovery import RawSelection
from etl.ingest.readers import read_raw_records
from etl.ingest.reprocess import reprocess_quarantine
from etl.ingest.run import _ingest_once, exclude_events, ingest
from etl.tables import schemas
from etl.tables.arrow import snapshot
from etl.tables.lake import Lake
from tests.pipeline import rows

pytestmark = pytest.mark.spark

DAY_1, DAY_2 = date(2026, 1, 1), date(2026, 1, 2)


def records(day: date, n: int, **values: object) -> Iterator[dict[str, Any]]:
    start = (day - date(1970, 1, 1)).days * 86_400
    for i in range(n):
        row = {"id": f"{day}-{i}", "who": f"u{i % 7}", "what": "shoe", "page": "home"}
        yield row | {"action": "shown", "at": start + i, "phone": "ios"} | values


def write(shop: Lake, log: str, day: date, *parts: Iterator[dict[str, Any]]) -> str:
    raw = Path(shop.root).with_name("raw")
    (raw / log).mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for part in parts for record in part)
    (raw / log / f"{day}.json").write_text(lines)
    return str(raw)


def test_an_optional_log_with_few_records_may_lack_a_column(shop: Lake) -> None:
    raw = write(shop, "app", DAY_1, records(DAY_1, 200))
    assert ingest(shop, raw, (DAY_1, DAY_1))["kept"] == 200
    write(shop, "sales", DAY_2, records(DAY_2, 3))  # no record names its impression
    write(shop, "app", DAY_2, records(DAY_2, 200))
    assert ingest(shop, raw, (DAY_2, DAY_2))["kept"] == 203


def test_a_column_may_first_appear_on_a_later_day(shop: Lake) -> None:
    raw = write(shop, "app", DAY_1, records(DAY_1, 200, phone=None))
    with pytest.raises(UserError, match="the spec names column phone, but no record of log app"):
        ingest(shop, raw, (DAY_1, DAY_1))
    write(shop, "app", DAY_2, records(DAY_2, 200))
    assert ingest(shop, raw, (DAY_1, DAY_1))["kept"] == 200


def test_a_corrupt_file_of_a_later_day_does_not_stop_the_ingest(shop: Lake) -> None:
    """It is read to look for a column that these days lack, as far as possible."""
    raw = write(shop, "app", DAY_1, records(DAY_1, 200, phone=None))
    later = "".join(json.dumps(record) + "\n" for record in records(DAY_2, 5000))
    app = shop.spec.log_sources["app"].model_copy(update={"path": "app/{day}.json*"})
    sources = shop.spec.sources | {"app": app}
    lake = Lake(shop.root, shop.spec.model_copy(update={"sources": sources}))
    Path(raw, f"app/{DAY_2}.json.gz").write_bytes(gzip.compress(later.encode())[:-2000])
    assert ingest(lake, raw, (DAY_1, DAY_1))["kept"] == 200


def test_days_are_read_again_once_for_any_number_of_corrupt_files(
    shop: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, sales = (shop.spec.log_sources[name] for name in ("app", "sales"))
    sources = shop.spec.sources | {
        "app": app.model_copy(update={"path": "app/{day}*"}),
        "sales": sales.model_copy(update={"path": "sales/{day}*", "format": "parquet"}),
    }
    lake = Lake(shop.root, shop.spec.model_copy(update={"sources": sources}))
    raw = Path(write(shop, "app", DAY_1, records(DAY_1, 200)))
    (raw / "sales").mkdir()
    expected = set()
    for n in range(3):
        rows_of_file = [row | {"id": f"{n}-{row['id']}"} for row in records(DAY_1, 3000, imp="i")]
        lines = "".join(json.dumps(row) + "\n" for row in rows_of_file)
        compressed = gzip.compress(lines.encode())
        (raw / f"app/{DAY_1}-{n}.json.gz").write_bytes(compressed[: len(compressed) - 900 * n])
        sold = raw / f"sales/{DAY_1}-{n}.parquet"
        pq.write_table(pa.Table.from_pylist(rows_of_file), sold)
        if n:
            content = sold.read_bytes()
            sold.write_bytes(content[:8] + bytes(400) + content[408:])
            expected |= {f"{DAY_1}-{n}.json.gz", sold.name}
    attempts: list[object] = []

    def attempt(*args: Any) -> dict[str, int]:
        attempts.append(args)
        return _ingest_once(*args)

    monkeypatch.setattr("etl.ingest.run._ingest_once", attempt)
    assert ingest(lake, str(raw), (DAY_1, DAY_1))["kept"] > 6200
    assert len(attempts) == 2
    quarantined = snapshot(lake, schemas.quarantine(lake.spec)).read()["source_file"].to_pylist()
    assert {path.rpartition("/")[2] for path in quarantined} == expected


def test_many_unreadable_files_do_not_enlarge_the_query_plan(
    shop: Lake, tmp_path: Path, spark: SparkSession
) -> None:
    app = shop.spec.log_sources["app"].model_copy(update={"path": "app/{day}/*.json"})
    folder = tmp_path / "raw" / "app" / f"{DAY_1}"
    folder.mkdir(parents=True)
    (folder / "good.json").write_text("{}")
    plans = []
    for number in range(3):
        (folder / f"{number}.json").touch()
        found = read_raw_records(app, RawSelection(str(tmp_path / "raw"), (DAY_1, DAY_1)), ["id"])
        plans.append(found._jdf.queryExecution().analyzed().toString().count("Union"))
        assert found.filter("read_error = 'empty file'").count() == number + 1
    assert plans == [1, 1, 1]


@pytest.mark.parametrize(
    ("log", "bad", "message"),
    [
        ("sales", {"at": "noon"}, "120 of 120 records of log sales of 2026-01-01 are bad"),
        (
            "app",
            {"page": "search", "who": ""},
            "120 of 120 records of log app on surface search of 2026-01-01",
        ),
    ],
)
def test_a_bad_log_or_surface_is_refused_on_an_otherwise_good_day(
    shop: Lake, log: str, bad: dict[str, object], message: str
) -> None:
    good = records(DAY_1, 2000)
    parts = [good, records(DAY_1, 120, **bad)] if log == "app" else [good]
    raw = write(shop, "app", DAY_1, *parts)
    if log == "sales":
        write(shop, "sales", DAY_1, records(DAY_1, 120, imp="i", **bad))
    with pytest.raises(UserError, match=message):
        ingest(shop, raw, (DAY_1, DAY_1))
    assert not shop.exists("events")


@pytest.mark.parametrize("shared", [False, True])
def test_event_ids_are_unique_within_a_log_unless_the_spec_shares_them(
    shop: Lake, shared: bool
) -> None:
    spec = shop.spec.model_copy(update={"shared_event_ids": shared})
    lake = Lake(shop.root, spec)
    raw = write(
        shop, "app", DAY_1, records(DAY_1, 3, action="click"), records(DAY_1, 1, action="click")
    )
    write(shop, "sales", DAY_1, records(DAY_1, 2))
    assert ingest(lake, raw, (DAY_1, DAY_1))["duplicates"] == (3 if shared else 1)
    events = rows(lake, "events")
    keys = {(row["log"], row["event_id"]) for row in events}
    assert len(keys) == len(events) == (3 if shared else 5)


def test_an_empty_id_is_none(shop: Lake) -> None:
    """Impressions without an id of their own are not copies, nor is their request one."""
    app = shop.spec.log_sources["app"]
    columns = app.columns.model_copy(update={"impression": "imp", "request": "req"})
    sources = shop.spec.sources | {"app": app.model_copy(update={"columns": columns})}
    lake = Lake(shop.root, shop.spec.model_copy(update={"sources": sources}))
    clicks = records(DAY_1, 2, action="click", imp="", req="", id="c")
    raw = write(shop, "app", DAY_1, records(DAY_1, 5, imp="", req=""), clicks)
    assert ingest(lake, raw, (DAY_1, DAY_1))["duplicates"] == 1, "of the two clicks"
    stored = {row["event_id"]: row for row in rows(lake, "events")}
    assert {row["request_id"] for row in stored.values()} == {None}
    assert stored.pop("c")["impression_id"] is None
    assert [row["impression_id"] for row in stored.values()] == list(stored)
    assert len(stored) == 5


def test_the_event_cap_of_many_users_does_not_enlarge_the_query_plan(
    shop: Lake, spark: SparkSession
) -> None:
    spec = shop.spec.model_copy(update={"max_events_per_user_day": 2})
    events = spark.range(6000).selectExpr(
        f"DATE '{DAY_1}' AS day",
        "CONCAT('bot', id % 2000) AS user_id",
        "id AS visible_ts",
        "id AS event_ts",
        "CAST(id AS STRING) AS event_id",
    )
    kept, excluded = exclude_events(spec, events, events.limit(0))
    assert (kept.count(), excluded.count()) == (4000, 2000)
    (latest,) = kept.agg(F.max("visible_ts")).collect()
    assert latest[0] == 3999, "the first events of the day are kept"
    assert "bot1999" not in kept._jdf.queryExecution().analyzed().toJSON()


def test_the_event_cap_keeps_the_first_events_of_a_user_and_day(
    shop: Lake, spark: SparkSession
) -> None:
    cap, rng = 30, random.Random(0)
    days, users = [DAY_1, DAY_1 + timedelta(days=1)], ["bot", "bot", "bot", "person"]
    events = [
        (rng.choice(days), rng.choice(users), rng.randrange(40), rng.randrange(3), f"e{k}")
        for k in range(400)
    ]
    expected = set()
    for user_day in {event[:2] for event in events}:
        expected |= {*sorted(event for event in events if event[:2] == user_day)[:cap]}
    schema = "day date, user_id string, visible_ts long, event_ts long, event_id string"
    frame = spark.createDataFrame(events, schema)
    spec = shop.spec.model_copy(update={"max_events_per_user_day": cap})
    kept, excluded = exclude_events(spec, frame, frame.limit(0))
    assert sorted(map(tuple, kept.collect())) == sorted(expected)
    assert sorted(row[:-1] for row in excluded.collect()) == sorted({*events} - expected)


def test_an_unaccounted_record_stops_the_ingest_before_anything_is_written(
    shop: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = write(shop, "app", DAY_1, records(DAY_1, 200))
    # Simulates a defect that loses one of the records that were read.
    monkeypatch.setattr("etl.ingest.run.records_by_day", lambda _: {DAY_1: 201})
    with pytest.raises(AssertionError, match=r"201 records were read, .*'kept': 200"):
        ingest(shop, raw, (DAY_1, DAY_1))
    assert not any(
        shop.exists(table)
        for table in ("events", "quarantine", "excluded_events", "ingest_metrics")
    )


def test_days_before_the_first_released_record_are_not_rewritten(shop: Lake) -> None:
    days = [date(2026, 1, number) for number in (1, 2, 3)]
    for number, day in enumerate(days):
        bad = records(day, min(number, 1), id=f"k{number}", action="klick")
        raw = write(shop, "app", day, records(day, 200), bad)
        ingest(shop, raw, (day, day))
    files = files_by_day(shop)
    app = shop.spec.log_sources["app"]
    types = {"shown": "shown", "click": "click", "klick": "click"}
    app = app.model_copy(update={"types": types})
    lake = Lake(
        shop.root, shop.spec.model_copy(update={"sources": shop.spec.sources | {"app": app}})
    )
    reprocessed = reprocess_quarantine(lake, (days[0], days[2]))
    assert reprocessed == {"released": 2, "still quarantined": 0}
    unchanged = {day for day, paths in files_by_day(lake).items() if paths == files[day]}
    assert unchanged == {days[0]}
    released, metrics = rows(lake, "events"), rows(lake, "ingest_metrics")
    ingest(lake, raw, (days[0], days[2]))
    assert (rows(lake, "events"), rows(lake, "ingest_metrics")) == (released, metrics)


def files_by_day(lake: Lake) -> dict[date, set[str]]:
    files: dict[date, set[str]] = defaultdict(set)
    for path, partition in snapshot(lake, schemas.events(lake.spec)).files:
        files[date.fromisoformat(str(partition["day"]))].add(path)
    return files
