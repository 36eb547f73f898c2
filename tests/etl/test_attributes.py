"""Laws of attributes: since when a version holds, by how its file tells; and what is refused."""

import json
import logging
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest

from etl.attributes import load_attributes
from etl.errors import UserError
from etl.spec import load_spec
from etl.tables import contracts, delta
from etl.tables.arrow import snapshot
from etl.tables.lake import Lake
from tests.pipeline import rows

pytestmark = pytest.mark.spark

ONE, TWO, THREE = (date(2026, 1, day) for day in (1, 2, 3))
HOUR, DAY = 3600, 86_400
SPEC = """
name: tiny
buckets: 1
most_quarantined: 0.4
surfaces: {{home: {{}}}}
events: {{shown: {{kind: ad, role: impression}}, click: {{kind: ad, role: outcome}}}}
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
ONE_FILE = "path: users.json"


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
    """User, the second from which a version holds, and its plan."""
    stored = snapshot(lake, contracts.attributes(lake.spec, "user")).read().to_pylist()
    return sorted((r["user_id"], r["valid_from"] // 10**6, r["x_plan"]) for r in stored)


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize(
    ("source", "since", "holds"),
    [
        (f"{BY_DAY}, valid_from: since", second(ONE, 8), second(ONE, 8)),
        (f"{BY_DAY}, valid_from: since", second(ONE, -30), second(ONE)),
        (f"{BY_DAY}, valid_from: since, delay: 2h", second(ONE, 8), second(ONE, 10)),
        (BY_DAY, None, second(TWO)),
        (f"{BY_DAY}, delay: 4h", None, second(TWO, 4)),
        (f"{ONE_FILE}, static: true", None, 0),
        (f"{ONE_FILE}, static: true, valid_from: since", second(ONE, -30), second(ONE, -30)),
        (ONE_FILE, None, second(TWO)),
        (f"{ONE_FILE}, valid_from: since", second(ONE, -30), second(ONE)),
    ],
)
def test_a_version_never_holds_before_it_was_known(
    tmp_path: Path, source: str, since: int | None, holds: int
) -> None:
    lake = lake_of(tmp_path, source)
    write(
        tmp_path,
        f"users/{ONE}.json" if BY_DAY in source else "users.json",
        user("u", "free", since),
    )
    load_attributes(lake, str(tmp_path), (ONE, ONE))
    assert versions(lake) == [("u", holds, "free")]


@pytest.mark.usefixtures("spark")
def test_of_two_changes_before_a_day_the_later_holds(tmp_path: Path) -> None:
    lake = lake_of(tmp_path, f"{BY_DAY}, valid_from: since")
    later, earlier = user("u", "free", second(ONE, -2)), user("u", "paid", second(ONE, -3))
    write(tmp_path, f"users/{ONE}.json", later, earlier)
    load_attributes(lake, str(tmp_path), (ONE, ONE))
    assert versions(lake) == [("u", second(ONE), "free")]


@pytest.mark.usefixtures("spark")
def test_a_changing_file_holds_from_the_day_on_which_it_was_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    daily, raw = lake_of(tmp_path, ONE_FILE, "daily"), str(tmp_path)
    states = {
        ONE: [user("a", "free"), user("b", "free")],
        TWO: [user("a", "paid"), user("b", "free")],
        THREE: [user("a", "free"), user("b", "free"), user("c", "free")],
    }
    for day, state in states.items():
        write(tmp_path, "users.json", *state)
        for _ in range(2 if day == TWO else 1):  # a day that is run again changes nothing
            load_attributes(daily, raw, (day, day))
    known = [
        ("a", second(TWO), "free"),
        ("a", second(THREE), "paid"),
        ("a", second(THREE) + DAY, "free"),
        ("b", second(TWO), "free"),
        ("c", second(THREE) + DAY, "free"),
    ]
    assert versions(daily) == known
    with caplog.at_level(logging.WARNING):
        ranged = lake_of(tmp_path, ONE_FILE, "ranged")
        load_attributes(ranged, raw, (ONE, THREE))
    assert (
        "users.json is read as it is now: what changed in it holds from 2026-01-03" in caplog.text
    )
    assert versions(ranged) == [(name, second(THREE) + DAY, "free") for name in "abc"]


@pytest.mark.usefixtures("spark")
def test_a_changing_file_is_not_read_for_a_day_that_is_past(
    tmp_path: Path, spark: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lake, raw = lake_of(tmp_path, ONE_FILE), str(tmp_path)
    write(tmp_path, "users.json", user("a", "free"))
    load_attributes(lake, raw, (ONE, ONE))
    contract = contracts.events(lake.spec)
    day = {"day": f"DATE '{TWO}'", "event_ts": "1767312000000000", "ingest_ts": "1767312000000000"}
    values = [f"CAST({day.get(n, '1')} AS {t}) AS `{n}`" for n, t in contract.columns.items()]
    delta.replace(lake, contract, spark.range(1).selectExpr(*values), f"day = '{TWO}'", {})
    write(tmp_path, "users.json", user("a", "paid"))
    with caplog.at_level(logging.WARNING):
        load_attributes(lake, raw, (ONE, ONE))
    assert "it tells the state of 2026-01-02 or later, not of 2026-01-01" in caplog.text
    assert versions(lake) == [("a", second(TWO), "free")]


@pytest.mark.usefixtures("spark")
def test_a_static_row_never_changes(tmp_path: Path) -> None:
    source, raw = f"{ONE_FILE}, static: true", str(tmp_path)
    daily, ranged = lake_of(tmp_path, source, "daily"), lake_of(tmp_path, source, "ranged")
    write(tmp_path, "users.json", user("a", "free"))
    load_attributes(daily, raw, (ONE, ONE))
    write(tmp_path, "users.json", user("a", "free"), user("b", "free"))
    load_attributes(daily, raw, (TWO, TWO))
    load_attributes(ranged, raw, (ONE, TWO))
    assert versions(daily) == versions(ranged) == [("a", 0, "free"), ("b", 0, "free")]
    write(tmp_path, "users.json", user("a", "free"), user("b", "paid"))
    with pytest.raises(UserError, match=r"users.json is static in the spec, but its row of user b"):
        load_attributes(daily, raw, (TWO, TWO))
    assert versions(daily) == versions(ranged)


@pytest.mark.usefixtures("spark")
def test_a_value_of_a_wrong_type_is_quarantined_and_too_many_are_refused(tmp_path: Path) -> None:
    lake, raw = lake_of(tmp_path, BY_DAY), str(tmp_path)
    good = [user(name, "free") for name in "abc"]
    write(tmp_path, f"users/{ONE}.json", *good, user("d", "free", age="thirty"))
    load_attributes(lake, raw, (ONE, ONE))
    assert [name for name, *_ in versions(lake)] == ["a", "b", "c"]
    (bad,) = rows(lake, "quarantine")
    assert (bad["log"], bad["line"], bad["reasons"]) == ("users", 4, ["wrong type: age"])
    write(tmp_path, f"users/{TWO}.json", good[0], *[user(n, "free", age="x") for n in "bc"])
    with pytest.raises(UserError, match=r"2 of 3 rows of .* are bad \(wrong type: age: 2\)"):
        load_attributes(lake, raw, (TWO, TWO))
    assert len(versions(lake)) == 3


def test_a_static_source_is_one_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a static source is one file for all days"):
        lake_of(tmp_path, f"{BY_DAY}, static: true")
