"""What arrives late, twice or with a wrong clock changes nothing that was said before."""

import gzip
import json
from collections.abc import Iterable
from datetime import UTC, date, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from etl.attributes import load_attributes
from etl.errors import UserError
from etl.ingest import ingest
from etl.labels import label
from etl.spec import load_spec
from etl.tables import contracts, delta
from etl.tables.create import create
from etl.tables.lake import Lake
from etl.tables.schema import arrow_schema
from features.examples import build_examples
from features.items import index_items
from tests.conftest import LAST
from tests.pipeline import TABLES, build_tables, rows

pytestmark = pytest.mark.spark

ONE, TWO, THREE = (date(2026, 1, day) for day in (1, 2, 3))
SPEC = """
name: tiny
buckets: 1
lateness: 2d
surfaces: {home: {}}
events:
  shown: {kind: ad, role: impression}
  click: {kind: ad, role: outcome}
  purchase: {kind: ad, role: outcome}
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


def at(day: int, hour: int, minute: int = 0) -> int:
    return int(datetime(2026, 1, day, hour, minute, tzinfo=UTC).timestamp() * 1000)


def event(id_: str, action: str, what: str, ms: int, logged: int = 0, imp: str = "") -> dict:
    said = {"id": id_, "who": "u", "what": what, "page": "home", "action": action, "ms": ms}
    return said | {"logged": logged or ms + 1000} | ({"imp": imp} if imp else {})


EVENTS = {
    ONE: [
        event("s1", "shown", "shoe", at(1, 8), imp="i1"),
        event("s1-again", "shown", "shoe", at(1, 8), at(1, 9), imp="i1"),  # the client tried twice
        event("c1", "click", "shoe", at(1, 9), imp="i1"),
        event("p1", "purchase", "shoe", at(1, 12)),  # names no impression
        event("s9", "shown", "hat", at(2, 0, 40), at(1, 23, 50), imp="i9"),  # a clock ahead
    ],
    TWO: [
        event("s2", "shown", "shoe", at(1, 10), at(2, 3), imp="i2"),  # a day late
        event("c2", "click", "shoe", at(1, 11), at(2, 3), imp="i2"),
        event("s3", "shown", "coat", at(2, 15), imp="i3"),
    ],
}
USERS = {
    ONE: [{"who": "u", "plan": "free", "since": at(1, 0)}],
    TWO: [{"who": "u", "plan": "paid", "since": at(2, 0)}],
}


def write(folder: Path, day: date, records: list[dict]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / f"{day}.json.gz").write_bytes(gzip.compress(lines.encode()))


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    for day in EVENTS:
        write(tmp_path / "raw/events", day, EVENTS[day])
        write(tmp_path / "raw/users", day, USERS[day])
    return tmp_path / "raw"


@pytest.fixture
def own(spark: object, tmp_path: Path) -> Lake:
    (tmp_path / "tiny.yaml").write_text(SPEC)
    return Lake(str(tmp_path / "lake"), load_spec(tmp_path / "tiny.yaml"))


def by_id(lake: Lake, table: str, column: str) -> dict:
    return {row["impression_id"]: row[column] for row in rows(lake, table)}


def test_day_by_day_nothing_said_before_changes(own: Lake, logs: Path) -> None:
    build_tables(own, logs, (ONE, ONE))
    assert by_id(own, "examples", "n_user_shown_1d") == {"i1": 0, "i9": 1}, "one row an impression"
    assert by_id(own, "examples", "as_of_ts")["i9"] == at(1, 23, 50) // 1000, "its own clock"
    plans = by_id(own, "examples", "u_plan")
    ingest(own, str(logs), (TWO, TWO))
    load_attributes(own, str(logs), (TWO, TWO))
    label(own, (TWO, TWO))
    labels = by_id(own, "impressions", "label_purchase")
    assert (labels["i1"], labels["i2"]) == (1, 0), "a touch that landed later took the credit"
    with pytest.raises(UserError, match=f"was made from what .* held: .* --days {ONE}:{TWO}"):
        ingest(own, str(logs), (ONE, ONE))
    build_examples(own, (ONE, ONE))
    assert by_id(own, "examples", "u_plan")["i9"] == plans["i9"], "a plan of the day after"


@pytest.mark.proof
def test_day_by_day_gives_the_tables_of_one_range(
    spark: object, lake: Lake, raw: Path, tmp_path: Path
) -> None:
    by_day = Lake(str(tmp_path / "lake"), lake.spec)
    for first, last in ((ONE, ONE), (TWO, LAST), (LAST, LAST)):
        build_tables(by_day, raw, (first, last))
    for name in TABLES:
        assert rows(by_day, name) == rows(lake, name), name


def seen(lake: Lake, day: date, items: Iterable[str]) -> None:
    """Replace a day of `events`: each item is shown once."""
    contract = contracts.events(lake.spec)
    ts, code = lake.spec.day_start(day), lake.spec.event_codes["shown"]
    shown = [
        {
            "event_id": f"{day}-{item}", "user_id": "u", "item_id": item, "surface": 1,
            "type": code,
            "event_ts": ts * 10**6, "ingest_ts": ts * 10**6, "visible_ts": ts, "day": day,
            "bucket": 0,
        }
        for item in items
    ]  # fmt: skip
    table = pa.Table.from_pylist(shown, arrow_schema(contract))
    frame = SparkSession.active().createDataFrame(table, contract.ddl)
    delta.replace(lake, contract, frame, f"day = '{day}'", {})


def test_a_corrected_log_never_gives_an_index_twice(own: Lake) -> None:
    create(own, contracts.attributes(own.spec, "item"))
    seen(own, ONE, ("shoe", "hat"))
    index_items(own, (ONE, ONE))
    index = {row["item_id"]: row["item_ix"] for row in rows(own, "items")}
    last = max(index, key=index.__getitem__)
    seen(own, ONE, index.keys() - {last})
    seen(own, TWO, ("coat", "shoe"))
    for day in (ONE, TWO):
        index_items(own, (day, day))
    found = {row["item_id"]: row["item_ix"] for row in rows(own, "items")}
    assert len(set(found.values())) == len(found) == 3
    assert all(found[item] == index[item] for item in index)


def test_days_may_not_be_left_out(own: Lake, tmp_path: Path) -> None:
    seen(own, ONE, ("shoe",))
    with pytest.raises(UserError, match="2026-01-02 to 2026-01-02 have not been ingested"):
        ingest(own, str(tmp_path), (THREE, THREE))
