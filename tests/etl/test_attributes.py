"""Attributes: the valid-from time of versions for each kind of source, and refused input."""

import json
import logging
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from etl.attributes import load_attributes
from etl.errors import UserError
from etl.spec import load_spec
from etl.tables import schemas, spark_io
from etl.tables.arrow import snapshot
from etl.tables.day_order import days_in_order
from etl.tables.lake import Lake
from tests.pipeline import rows

pytestmark = pytest.mark.spark

DAY_1, DAY_2, DAY_3 = (date(2026, 1, day) for day in (1, 2, 3))
HOUR, DAY = 3600, 86_400
SPEC = """
name: tiny
buckets: 1
max_bad_record_rate: 0.4
surfaces: {{home: {{}}}}
events: {{shown: {{role: impression}}, click: {{role: outcome}}}}
objectives: {{click: {{event: click, window: 1h}}}}
attributes:
  user:
    plan: {{type: categorical, vocabulary: [free, paid]}}
    age: {{type: numeric}}
sequences: {{behaviour: {{}}}}
counters: {{windows: [1h], events: [shown], keys: [[user]]}}
sources:
  log:
    kind: event_log
    format: json
    path: events/{{day}}.json
    columns: {{user: who, item: what, surface: page, type: action, event_time: ms}}
  users: {{kind: attributes, entity: user, format: json, key: who, time_unit: s, {source}}}
"""
BY_DAY = 'path: "users/{day}.json"'
SNAPSHOT = "path: users.json"


def lake_of(folder: Path, source: str, name: str = "lake") -> Lake:
    (folder / "spec.yaml").write_text(SPEC.format(source=source))
    return Lake(str(folder / name), load_spec(folder / "spec.yaml"))


def write(folder: Path, file: str, *users: dict[str, Any]) -> None:
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(user) + "\n" for user in users))


def user(name: str, plan: str, since: int | None = None, age: object = 30) -> dict[str, Any]:
    row = {"who": name, "plan": plan, "age": age}
    return row if since is None else row | {"since": since}


def second(day: date, hour: int = 0) -> int:
    return int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()) + hour * HOUR


def versions(lake: Lake) -> list[tuple[str, int, str]]:
    """User, the second from which a version is valid, and its plan."""
    stored = snapshot(lake, schemas.attributes(lake.spec, "user")).read().to_pylist()
    return sorted((r["user_id"], r["valid_from"] // 10**6, r["attr_plan"]) for r in stored)


def write_event(spark: SparkSession, lake: Lake, day: date) -> None:
    """Write an event of a day, as if the day had been ingested."""
    schema, start = schemas.events(lake.spec), str(second(day) * 10**6)
    event = {"day": f"DATE '{day}'", "event_ts": start, "ingest_ts": start}
    values = [f"CAST({event.get(n, '1')} AS {t}) AS `{n}`" for n, t in schema.columns.items()]
    events = spark.range(1).selectExpr(*values)
    spark_io.replace_partitions(lake, schema, events, f"day = '{day}'", {})


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize(
    ("source", "since", "valid_from"),
    [
        (f"{BY_DAY}, valid_from: since", second(DAY_1, 8), second(DAY_1, 8)),
        (f"{BY_DAY}, valid_from: since", second(DAY_1, -30), second(DAY_1)),
        (f"{BY_DAY}, valid_from: since, delay: 2h", second(DAY_1, 8), second(DAY_1, 10)),
        (BY_DAY, None, second(DAY_2)),
        (f"{BY_DAY}, delay: 4h", None, second(DAY_2, 4)),
        (f"{SNAPSHOT}, static: true", None, 0),
        (f"{SNAPSHOT}, static: true, valid_from: since", second(DAY_1, -30), second(DAY_1, -30)),
        (SNAPSHOT, None, second(DAY_2)),
        (f"{SNAPSHOT}, valid_from: since", second(DAY_1, -30), second(DAY_1)),
    ],
)
def test_a_version_is_never_valid_before_it_arrived(
    tmp_path: Path, source: str, since: int | None, valid_from: int
) -> None:
    lake = lake_of(tmp_path, source)
    file = f"users/{DAY_1}.json" if BY_DAY in source else "users.json"
    write(tmp_path, file, user("u", "free", since))
    load_attributes(lake, str(tmp_path), (DAY_1, DAY_1))
    assert versions(lake) == [("u", valid_from, "free")]


@pytest.mark.usefixtures("spark")
def test_the_later_of_two_changes_before_the_landing_day_wins(tmp_path: Path) -> None:
    lake = lake_of(tmp_path, f"{BY_DAY}, valid_from: since")
    later, earlier = user("u", "free", second(DAY_1, -2)), user("u", "paid", second(DAY_1, -3))
    write(tmp_path, f"users/{DAY_1}.json", later, earlier)
    load_attributes(lake, str(tmp_path), (DAY_1, DAY_1))
    assert versions(lake) == [("u", second(DAY_1), "free")]


@pytest.mark.usefixtures("spark")
def test_changes_of_a_snapshot_are_valid_from_the_end_of_the_day_of_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    daily, raw = lake_of(tmp_path, SNAPSHOT, "daily"), str(tmp_path)
    users_by_day = {
        DAY_1: [user("a", "free"), user("b", "free")],
        DAY_2: [user("a", "paid"), user("b", "free")],
        DAY_3: [user("a", "free"), user("b", "free"), user("c", "free")],
    }
    for day, users in users_by_day.items():
        write(tmp_path, "users.json", *users)
        for _ in range(2 if day == DAY_2 else 1):  # a repeated run changes nothing
            load_attributes(daily, raw, (day, day))
    expected = [
        ("a", second(DAY_2), "free"),
        ("a", second(DAY_3), "paid"),
        ("a", second(DAY_3) + DAY, "free"),
        ("b", second(DAY_2), "free"),
        ("c", second(DAY_3) + DAY, "free"),
    ]
    assert versions(daily) == expected
    with caplog.at_level(logging.WARNING):
        ranged = lake_of(tmp_path, SNAPSHOT, "ranged")
        load_attributes(ranged, raw, (DAY_1, DAY_3))
    assert (
        "users.json is a snapshot: its changes are valid from the end of 2026-01-03" in caplog.text
    )
    assert versions(ranged) == [(name, second(DAY_3) + DAY, "free") for name in "abc"]


@pytest.mark.usefixtures("spark")
def test_a_snapshot_is_not_read_for_a_day_before_the_latest(
    tmp_path: Path, spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    lake, raw = lake_of(tmp_path, SNAPSHOT), str(tmp_path)
    write(tmp_path, "users.json", user("a", "free"))
    load_attributes(lake, raw, (DAY_1, DAY_1))
    write_event(spark, lake, DAY_2)
    write(tmp_path, "users.json", user("a", "paid"))
    with caplog.at_level(logging.WARNING):
        load_attributes(lake, raw, (DAY_1, DAY_1))
    assert "it is a snapshot of 2026-01-02 or later, not of 2026-01-01" in caplog.text
    assert versions(lake) == [("a", second(DAY_2), "free")]


@pytest.mark.usefixtures("spark")
def test_a_changed_static_row_is_refused(tmp_path: Path) -> None:
    source, raw = f"{SNAPSHOT}, static: true", str(tmp_path)
    daily, ranged = lake_of(tmp_path, source, "daily"), lake_of(tmp_path, source, "ranged")
    write(tmp_path, "users.json", user("a", "free"))
    load_attributes(daily, raw, (DAY_1, DAY_1))
    write(tmp_path, "users.json", user("a", "free"), user("b", "free"))
    load_attributes(daily, raw, (DAY_2, DAY_2))
    load_attributes(ranged, raw, (DAY_1, DAY_2))
    assert versions(daily) == versions(ranged) == [("a", 0, "free"), ("b", 0, "free")]
    write(tmp_path, "users.json", user("a", "free"), user("b", "paid"))
    with pytest.raises(UserError, match=r"users.json is static in the spec, but its row of user b"):
        load_attributes(daily, raw, (DAY_2, DAY_2))
    assert versions(daily) == versions(ranged)


@pytest.mark.usefixtures("spark")
def test_static_rows_are_written_only_if_one_is_new(tmp_path: Path) -> None:
    lake, raw = lake_of(tmp_path, f"{SNAPSHOT}, static: true"), str(tmp_path)
    write(tmp_path, "users.json", user("a", "free"))
    load_attributes(lake, raw, (DAY_1, DAY_1))
    version = lake.version("attributes_user")
    load_attributes(lake, raw, (DAY_2, DAY_2))
    write(tmp_path, "users.json", user("a", "free"), user("a", "free"))
    load_attributes(lake, raw, (DAY_2, DAY_3))
    assert lake.version("attributes_user") == version
    write(tmp_path, "users.json", user("b", "paid"))
    load_attributes(lake, raw, (DAY_3, DAY_3))
    assert lake.version("attributes_user") == version + 1
    assert versions(lake) == [("a", 0, "free"), ("b", 0, "paid")]


@pytest.mark.usefixtures("spark")
def test_values_of_a_wrong_type_are_quarantined_and_too_many_are_refused(tmp_path: Path) -> None:
    lake, raw = lake_of(tmp_path, BY_DAY), str(tmp_path)
    good = [user(name, "free") for name in "abc"]
    write(tmp_path, f"users/{DAY_1}.json", *good, user("d", "free", age="thirty"))
    load_attributes(lake, raw, (DAY_1, DAY_1))
    assert [name for name, *_ in versions(lake)] == ["a", "b", "c"]
    (bad,) = rows(lake, "quarantine")
    assert (bad["log"], bad["line"], bad["reasons"]) == ("users", 4, ["wrong type: age"])
    write(tmp_path, f"users/{DAY_2}.json", good[0], *[user(n, "free", age="x") for n in "bc"])
    with pytest.raises(UserError, match=r"2 of 3 rows of .* are bad \(wrong type: age: 2\)"):
        load_attributes(lake, raw, (DAY_2, DAY_2))
    assert len(versions(lake)) == 3


def test_a_static_source_has_no_day_in_its_path(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a static source is one file for all days"):
        lake_of(tmp_path, f"{BY_DAY}, static: true")


@pytest.mark.usefixtures("spark")
def test_a_day_is_not_loaded_again_without_later_ones_that_were_compared_with_it(
    tmp_path: Path,
) -> None:
    """Day 3 repeats the version of day 2 and is not stored; events have not been ingested."""
    text = SPEC.format(source=BY_DAY).replace("  user:", "  item:").replace("y: user", "y: item")
    (tmp_path / "spec.yaml").write_text(text)
    lake, raw = Lake(str(tmp_path / "lake"), load_spec(tmp_path / "spec.yaml")), str(tmp_path)
    for day, plan in ((DAY_1, "paid"), (DAY_2, "free"), (DAY_3, "free")):
        write(tmp_path, f"users/{day}.json", user("item", plan))
        load_attributes(lake, raw, (day, day))
    assert [row["day"] for row in rows(lake, "attributes_item")] == [DAY_1, DAY_2]
    write(tmp_path, f"users/{DAY_2}.json", user("item", "paid"))
    with pytest.raises(UserError, match=f"of {DAY_3} have been loaded .* --days {DAY_2}:{DAY_3}"):
        load_attributes(lake, raw, (DAY_2, DAY_2))
    load_attributes(lake, raw, (DAY_2, DAY_3))
    assert [row["day"] for row in rows(lake, "attributes_item")] == [DAY_1, DAY_3]


def test_a_day_that_failed_can_be_loaded_after_the_next_day_was_ingested(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Attributes of the next day were refused, so that nothing has been compared with them."""
    text = SPEC.format(source=BY_DAY).replace("  user:", "  item:").replace("y: user", "y: item")
    (tmp_path / "spec.yaml").write_text(text)
    lake, raw = Lake(str(tmp_path / "lake"), load_spec(tmp_path / "spec.yaml")), str(tmp_path)
    for day, plan in ((DAY_1, "paid"), (DAY_2, "free"), (DAY_3, "free")):
        write(tmp_path, f"users/{day}.json", user("item", plan))
    load_attributes(lake, raw, (DAY_1, DAY_1))
    with days_in_order(lake, "items", (DAY_1, DAY_1)):
        pass
    write_event(spark, lake, DAY_3)
    for day in (DAY_2, DAY_3):
        load_attributes(lake, raw, (day, day))
    assert [row["day"] for row in rows(lake, "attributes_item")] == [DAY_1, DAY_2]
    lake_of_all_days = Lake(str(tmp_path / "at once"), lake.spec)
    load_attributes(lake_of_all_days, raw, (DAY_1, DAY_3))
    assert rows(lake_of_all_days, "attributes_item") == rows(lake, "attributes_item")
    with days_in_order(lake, "items", (DAY_2, DAY_3)):
        pass
    with pytest.raises(UserError, match=f"--days {DAY_2}:{DAY_3}"):
        load_attributes(lake, raw, (DAY_2, DAY_2))
