"""`gemline spec infer`: a first spec from files."""

import csv
import gzip
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from deltalake import write_deltalake
from hypothesis import given
from hypothesis import strategies as st

from etl.errors import UserError
from etl.spec import DataSpec, load_spec
from etl.spec.infer import infer_spec
from etl.spec.sample import Column, path_pattern
from etl.spec.sample_events import spec_name


def inferred(folder: Path, tmp_path: Path) -> tuple[DataSpec, dict[str, Any]]:
    """The inferred spec, loaded, and as YAML."""
    file = tmp_path / "inferred.yaml"
    file.write_text(infer_spec(folder))
    return load_spec(file), yaml.safe_load(file.read_text())


def write_json_lines(file: Path, records: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress("\n".join(map(json.dumps, records)).encode()))


def test_the_columns_of_the_simulator_are_found(raw: Path, tmp_path: Path) -> None:
    _, written = inferred(raw, tmp_path)
    log = written["sources"]["events"]
    expected = {
        "event_id": "event_id", "user": "user_id", "item": "item_id", "surface": "surface",
        "type": "type", "event_time": "event_time", "ingest_time": "ingest_time",
        "request": "request_id", "impression": "impression_id", "position": "position",
        "dwell": "dwell_ms", "value": "value", "propensity": "propensity",
    }  # fmt: skip
    assert log["columns"] == expected
    assert log["path"] == "events/day={day}/*.json.gz" and log["time_unit"] == "ms"
    assert written["events"]["ad_impression"] == {"role": "impression"}
    assert set(written["surfaces"]) == {"feed", "reels", "messaging"}
    assert written["attributes"]["context"]["position"] == {"type": "numeric"}
    assert written["position_bias"] == {"attribute": "position", "served_position": 0}
    assert written["attributes"]["item"]["creative"] == {"type": "vector", "width": 16}
    dwell = {"event": "ad_view", "window": "1h", "target": "dwell"}
    assert written["auxiliary_objectives"] == {"ad_view_dwell": dwell}, "posts have no impression"
    assert {"ad_click", "conversion"} <= set(written["objectives"])


def test_lists_of_values_are_read_as_several_categories(tmp_path: Path) -> None:
    """Of few values as a vocabulary; lists of as many numbers in each record are vectors."""
    folder = tmp_path / "lists"
    start = datetime(2026, 1, 1, tzinfo=UTC)
    records: list[dict[str, Any]] = [
        {
            "user_id": f"u{n % 7}",
            "item_id": f"i{n % 5}",
            "type": ("impression", "click")[n % 3 == 0],
            "timestamp": (start + timedelta(minutes=n)).isoformat(),
            "tags": ["red", "blue", "new"][: n % 4],
            "words": [f"w{n}", f"w{n + 1}"],
            "place": [n / 7, 1.0],
        }
        for n in range(200)
    ]
    write_json_lines(folder / "events" / "2026-01-01" / "a.json.gz", records)
    context = inferred(folder, tmp_path)[1]["attributes"]["context"]
    vocabulary = ["blue", "new", "red"]
    assert context["tags"] == {"type": "multi_categorical", "vocabulary": vocabulary}
    assert context["words"] == {"type": "multi_categorical", "size": 256}
    assert context["place"] == {"type": "vector", "width": 2}


def test_a_wide_impression_log_with_files_of_users_and_items(tmp_path: Path) -> None:
    folder = tmp_path / "wide"
    folder.mkdir()
    with (folder / "log.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["user_id", "video_id", "tab", "time_ms", "date", "is_click", "scrolls"])
        rows.writerows(
            [i % 7, i, i % 2, 1_650_000_000_000 + i, 20220415, i % 3 == 0, i % 9] for i in range(50)
        )
    (folder / "videos.csv").write_text(
        "video_id,author_id,seconds\n" + "\n".join(f"{i},{i % 5},{i}.5" for i in range(50))
    )
    spec, written = inferred(folder, tmp_path)
    log = written["sources"]["log"]
    assert log["kind"] == "impression_log" and log["outcomes"] == [
        {"event": "click", "indicator": "is_click"}
    ]
    assert log["day"] == {"column": "date", "format": "%Y%m%d"}
    assert written["sources"]["videos"]["static"] is True
    assert written["attributes"]["item"]["author_id"]["type"] == "categorical"
    assert spec.impression_type == "impression"
    assert set(written["attributes"]["context"]) == {"hour"}, "a row has what followed, too"
    assert "    # scrolls: {type: " in infer_spec(folder)


def test_columns_and_files_with_the_same_name_get_names_of_their_own(tmp_path: Path) -> None:
    """A column `hour` beside the hour of the clock, two positions, and two formats of a log."""
    folder = tmp_path / "logs"
    records = [
        {"user_id": n % 7, "item_id": n % 5, "type": ("impression", "click")[n % 3 == 0],
         "tab": n % 2, "time_ms": 1_650_000_000_000 + n, "hour": n % 24, "rank": n % 4,
         "position": n % 8, "page.type": n % 3, "page_type": n % 2}
        for n in range(100)
    ]  # fmt: skip
    write_json_lines(folder / "events.json.gz", records)
    with (folder / "events.csv").open("w", newline="") as file:
        rows = csv.DictWriter(file, list(records[0]))
        rows.writeheader()
        rows.writerows(records)
    spec, written = inferred(folder, tmp_path)
    assert set(written["sources"]) == {"events", "events_2"}
    context = {name: a.get("column", name) for name, a in written["attributes"]["context"].items()}
    assert context == {
        "position": "rank", "position_2": "position", "hour": "hour", "hour_2": "hour_2",
        "page_type": "page.type", "page_type_2": "page_type",
    }  # fmt: skip
    assert written["attributes"]["context"]["hour_2"] == {"type": "clock", "part": "hour"}
    assert len(spec.log_sources) == 2


@pytest.mark.parametrize(("impressions", "is_large_sample"), [(1000, True), (150, False)])
def test_rare_outcomes_and_dwells_are_auxiliary_objectives(
    tmp_path: Path, impressions: int, is_large_sample: bool
) -> None:
    """Rare conversions are not: they are what campaigns pay for."""
    every = {"is_click": 3, "is_hate": 500, "is_purchase": 500}
    records = [
        {"user_id": i % 7, "video_id": i, "tab": i % 2, "time_ms": 1_650_000_000_000 + i,
         "play_time_ms": 100 * i, **{name: int(i % n == 0) for name, n in every.items()}}
        for i in range(impressions)
    ]  # fmt: skip
    write_json_lines(tmp_path / "log" / "2026-01-01" / "a.json.gz", records)
    spec, written = inferred(tmp_path / "log", tmp_path)
    rare = {"hate": {"event": "hate", "window": "1h"}} if is_large_sample else {}
    dwell = {"view_dwell": {"event": "view", "window": "1h", "target": "dwell"}}
    assert written["auxiliary_objectives"] == rare | dwell
    assert set(written["objectives"]) == {"click", "hate", "purchase"} - rare.keys()
    (log,) = written["sources"].values()
    assert "dwell" not in log["columns"]
    view = {"event": "view", "dwell": "play_time_ms", "delay": "play_time_ms"}
    assert log["outcomes"][-1] == view
    assert written["events"]["view"] == {"role": "activity"}
    assert written["rank_by"] == "click" and not spec.auction


def test_a_log_of_rare_outcomes_alone_keeps_them_as_objectives(tmp_path: Path) -> None:
    records = [
        {"user_id": i % 7, "video_id": i, "tab": i % 2, "time_ms": 1_650_000_000_000 + i,
         "is_hate": int(i == 0), "is_like": int(i == 1)}
        for i in range(1000)
    ]  # fmt: skip
    write_json_lines(tmp_path / "log" / "2026-01-01" / "a.json.gz", records)
    _, written = inferred(tmp_path / "log", tmp_path)
    assert set(written["objectives"]) == {"hate", "like"} and "auxiliary_objectives" not in written


@pytest.mark.parametrize(
    ("value", "unit"),
    [(1_767_225_600, "s"), (1_767_225_600_000, "ms"), (1_767_225_600_000_000, "us"),
     (1_767_225_600_000_000_000, "ns"), ("2026-01-01T00:00:00Z", "iso"),
     (datetime(2026, 1, 1, tzinfo=UTC), "iso"), ("u17", None), (17, None)],
)  # fmt: skip
def test_units_of_times_are_inferred_from_values(value: object, unit: str | None) -> None:
    assert Column("t", [value] * 3).time_unit == unit


def test_a_few_bad_values_do_not_change_the_inferred_type() -> None:
    times: list[object] = [1_767_225_600 + i for i in range(97)]
    assert Column("t", [*times, "soon", -1, "x"]).time_unit == "s"
    assert Column("t", [*times[:50], *["soon"] * 50]).time_unit is None


@pytest.mark.parametrize(
    ("path", "pattern"),
    [("events/day=2026-01-01/part-0.json.gz", "events/day={day}/*.json.gz"),
     ("events/20260101/a.json", "events/{day:%Y%m%d}/*.json"),
     ("e/2026-01-01/07/a.json", "e/{day}/*/*.json"),
     ("e/year=2026/month=1/day=02/x.gz", "e/year={day:%Y}/month={day:%-m}/day={day:%-d}/*.gz"),
     ("e/year=2026/month=01/day=02/x.gz", "e/year={day:%Y}/month={day:%m}/day={day:%d}/*.gz"),
     ("users/2026-01-01.csv", "users/{day}.csv"), ("items.csv", "items.csv")],
)  # fmt: skip
def test_paths_of_days_become_patterns(path: str, pattern: str) -> None:
    assert path_pattern(path) == pattern


def test_nested_fields_are_named_by_their_path(tmp_path: Path) -> None:
    records = [
        {
            "user": {"id": f"u{i}"},
            "item": {"id": "a"},
            "page": "home",
            "at": 1_767_225_600 + i,
            "action": "shown",
        }
        for i in range(20)
    ]
    write_json_lines(tmp_path / "log" / "2026-01-01" / "a.json.gz", records)
    (group,) = yaml.safe_load(infer_spec(tmp_path / "log"))["sources"].values()
    assert group["columns"]["event_time"] == "at"
    assert group["columns"]["user"] == "user.id" and group["columns"]["item"] == "item.id"


def test_a_folder_without_a_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="no file looks like a log"):
        infer_spec(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        infer_spec(tmp_path / "missing")


names = st.text("abcXYZ-_ 019.", min_size=1, max_size=12)


@given(
    types=st.lists(names, min_size=2, max_size=6, unique_by=spec_name),
    pages=st.lists(names, min_size=1, max_size=4, unique_by=spec_name),
)
def test_the_inferred_spec_is_valid_yaml_for_any_values(
    tmp_path_factory: pytest.TempPathFactory, types: list[str], pages: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("any")
    records = [
        {"user_id": "u", "item_id": "i", "page": page, "type": name, "event_time": 1_767_225_600}
        for name in types for page in pages
    ]  # fmt: skip
    write_json_lines(folder / "log" / "a.json.gz", records)
    written = yaml.safe_load(infer_spec(folder / "log"))
    assert set(written["events"]) == {spec_name(name) for name in types}
    assert set(written["surfaces"]) == {spec_name(page) for page in pages}
    for page in pages:
        assert written["surfaces"][spec_name(page)].get("logged_as", spec_name(page)) == page


def test_a_delta_table_is_not_read_as_files(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "events", pa.table({"user_id": ["u1"]}))
    with pytest.raises(UserError, match="is a Delta table, and a spec is inferred from files"):
        infer_spec(tmp_path)
