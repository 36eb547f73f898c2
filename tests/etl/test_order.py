"""Late events, duplicates and wrong clocks do not change what earlier runs have written."""

import gzip
import json
from collections.abc import Iterable
from datetime import UTC, date, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from etl.attributes import load_attributes
from etl.errors import UserError
from etl.ingest.run import ingest
from etl.labels import label_impressions
from etl.spec import load_spec
from etl.tables import schemas, spark_io
from etl.tables.lake import Lake, arrow_schema, create_table
from features.examples import build_examples
from features.items import index_items
from tests.conftest import LAST
from tests.pipeline import TABLES, build_tables, rows

pytestmark = pytest.mark.spark

DAY_1, DAY_2, DAY_3 = (date(2026, 1, day) for day in (1, 2, 3))
Record = dict[str, object]
SPEC = """
name: tiny
buckets: 1
allowed_lateness: 2d
surfaces: {home: {}}
events:
  shown: {role: impression}
  click: {role: outcome}
  purchase: {role: outcome}
objectives:
  purchase: {event: purchase, window: 1d, attribution: [{touch: click}]}
attributes:
  user: {plan: {type: categorical, vocabulary: [free, paid]}}
sequences: {behaviour: {max_length: 8}}
counters: {windows: [1d], events: [shown, click], keys: [[user], [item]]}
sources:
  log:
    kind: event_log
    format: json
    path: events/{day}.json.gz
    columns: {event_id: id, user: who, item: what, surface: page, type: action, event_time: ms,
              ingest_time: logged, impression: imp}
  users: {kind: attributes, entity: user, format: json, path: "users/{day}.json.gz", key: who,
          valid_from: since}
"""


def epoch_ms(day: int, hour: int, minute: int = 0) -> int:
    return int(datetime(2026, 1, day, hour, minute, tzinfo=UTC).timestamp() * 1000)


def event(id_: str, action: str, what: str, ms: int, **optional: object) -> Record:
    """An event of the user `u` that is logged a second later, unless `logged` is given."""
    required = {"id": id_, "who": "u", "what": what, "page": "home", "action": action, "ms": ms}
    return {**required, "logged": ms + 1000, **optional}


EVENTS: dict[date, list[Record]] = {
    DAY_1: [
        event("s1", "shown", "shoe", epoch_ms(1, 8), imp="i1"),
        # The client logged the same impression twice.
        event("s1-again", "shown", "shoe", epoch_ms(1, 8), logged=epoch_ms(1, 9), imp="i1"),
        event("c1", "click", "shoe", epoch_ms(1, 9), imp="i1"),
        # It names no impression.
        event("p1", "purchase", "shoe", epoch_ms(1, 12)),
        # The device's clock is fast.
        event("s9", "shown", "hat", epoch_ms(2, 0, 40), logged=epoch_ms(1, 23, 50), imp="i9"),
    ],
    DAY_2: [
        # Logged a day late.
        event("s2", "shown", "shoe", epoch_ms(1, 10), logged=epoch_ms(2, 3), imp="i2"),
        event("c2", "click", "shoe", epoch_ms(1, 11), logged=epoch_ms(2, 3), imp="i2"),
        event("s3", "shown", "coat", epoch_ms(2, 15), imp="i3"),
    ],
}
USERS: dict[date, list[Record]] = {
    DAY_1: [{"who": "u", "plan": "free", "since": epoch_ms(1, 0)}],
    DAY_2: [{"who": "u", "plan": "paid", "since": epoch_ms(2, 0)}],
}


def write(folder: Path, day: date, records: list[Record]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / f"{day}.json.gz").write_bytes(gzip.compress(lines.encode()))


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    for folder, records_by_day in (("events", EVENTS), ("users", USERS)):
        for day, records in records_by_day.items():
            write(tmp_path / "raw" / folder, day, records)
    return tmp_path / "raw"


@pytest.fixture
def tiny_lake(spark: object, tmp_path: Path) -> Lake:
    (tmp_path / "tiny.yaml").write_text(SPEC)
    return Lake(str(tmp_path / "lake"), load_spec(tmp_path / "tiny.yaml"))


def by_impression(lake: Lake, table: str, column: str) -> dict[str, Any]:
    return {row["impression_id"]: row[column] for row in rows(lake, table)}


@pytest.mark.proof  # by default test_disorder changes the future
def test_later_days_do_not_change_earlier_labels_and_features(tiny_lake: Lake, logs: Path) -> None:
    build_tables(tiny_lake, logs, (DAY_1, DAY_1))
    counts = by_impression(tiny_lake, "examples", "cnt_user_shown_1d")
    assert counts == {"i1": 0, "i9": 1}, "one row per impression"
    as_of = by_impression(tiny_lake, "examples", "as_of_ts")
    assert as_of["i9"] == epoch_ms(1, 23, 50) // 1000, "by the clock that logged it"
    plans = by_impression(tiny_lake, "examples", "user_plan")
    ingest(tiny_lake, str(logs), (DAY_2, DAY_2))
    load_attributes(tiny_lake, str(logs), (DAY_2, DAY_2))
    label_impressions(tiny_lake, (DAY_2, DAY_2))
    labels = by_impression(tiny_lake, "impressions", "label_purchase")
    assert (labels["i1"], labels["i2"]) == (1, 0), (
        "a touch that landed later does not change attribution"
    )
    with pytest.raises(
        UserError, match=f"{DAY_2} has been ingested already.* --days {DAY_1}:{DAY_2}"
    ):
        ingest(tiny_lake, str(logs), (DAY_1, DAY_1))
    build_examples(tiny_lake, (DAY_1, DAY_1))
    assert by_impression(tiny_lake, "examples", "user_plan")["i9"] == plans["i9"]


def test_labels_are_final_only_when_all_events_before_have_arrived(
    tiny_lake: Lake, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A day that is not over needs the end of its data, and earlier data cannot replace later."""
    ingest(tiny_lake, str(logs), (DAY_1, DAY_1))
    load_attributes(tiny_lake, str(logs), (DAY_1, DAY_1))
    day_end = tiny_lake.spec.day_end(DAY_1)
    with monkeypatch.context() as patch:
        patch.setattr("etl.event_time.time", SimpleNamespace(time=lambda: day_end - 3600))
        with pytest.raises(UserError, match=f"{DAY_1} is not over: pass --data-until"):
            label_impressions(tiny_lake, (DAY_1, DAY_1))
        label_impressions(tiny_lake, (DAY_1, DAY_1), day_end - 7200)
    label_impressions(tiny_lake, (DAY_1, DAY_1))
    labels = rows(tiny_lake, "impressions")
    with pytest.raises(UserError, match="labels were written with the data until"):
        label_impressions(tiny_lake, (DAY_1, DAY_1), day_end - 7200)
    assert rows(tiny_lake, "impressions") == labels


@pytest.mark.proof
@pytest.mark.usefixtures("spark")
def test_daily_runs_give_the_tables_of_one_run(lake: Lake, raw: Path, tmp_path: Path) -> None:
    by_day = Lake(str(tmp_path / "lake"), lake.spec)
    for first, last in ((DAY_1, DAY_1), (DAY_2, LAST), (LAST, LAST)):
        build_tables(by_day, raw, (first, last))
    for name in TABLES:
        assert rows(by_day, name) == rows(lake, name), name


def replace_impressions(lake: Lake, day: date, items: Iterable[str]) -> None:
    """Replace a day of `events` by one impression of each item."""
    schema = schemas.events(lake.spec)
    ts, code = lake.spec.day_start(day), lake.spec.event_codes["shown"]
    impressions = [
        {
            "event_id": f"{day}-{item}", "user_id": "u", "item_id": item, "surface": 1,
            "type": code,
            "event_ts": ts * 10**6, "ingest_ts": ts * 10**6, "visible_ts": ts, "day": day,
            "bucket": 0,
        }
        for item in items
    ]  # fmt: skip
    table = pa.Table.from_pylist(impressions, arrow_schema(schema))
    frame = SparkSession.active().createDataFrame(table, schema.ddl)
    spark_io.replace_partitions(lake, schema, frame, f"day = '{day}'", {})


def test_item_indices_are_never_reused_after_a_corrected_log(tiny_lake: Lake) -> None:
    create_table(tiny_lake, schemas.attributes(tiny_lake.spec, "item"))
    replace_impressions(tiny_lake, DAY_1, ("shoe", "hat"))
    index_items(tiny_lake, (DAY_1, DAY_1))
    index = {row["item_id"]: row["item_index"] for row in rows(tiny_lake, "items")}
    last = max(index, key=lambda item: index[item])
    replace_impressions(tiny_lake, DAY_1, index.keys() - {last})
    replace_impressions(tiny_lake, DAY_2, ("coat", "shoe"))
    for day in (DAY_1, DAY_2):
        index_items(tiny_lake, (day, day))
    new_index = {row["item_id"]: row["item_index"] for row in rows(tiny_lake, "items")}
    assert len(set(new_index.values())) == len(new_index) == 3
    assert all(new_index[item] == index[item] for item in index)


def test_days_may_not_be_skipped(tiny_lake: Lake, tmp_path: Path) -> None:
    replace_impressions(tiny_lake, DAY_1, ("shoe",))
    with pytest.raises(UserError, match="2026-01-02 to 2026-01-02 have not been ingested"):
        ingest(tiny_lake, str(tmp_path), (DAY_3, DAY_3))
