"""The page of an impression equals the naive reference and names its raw record."""

import gzip
import random
import re
from pathlib import Path
from typing import Any

import pytest

from etl.errors import UserError
from etl.tables import schemas
from etl.tables.arrow import snapshot
from etl.tables.lake import Lake
from features import reference
from ranking.explain import ImpressionPage, exact_utc, explain_impression
from tests.pipeline import rows


@pytest.fixture(scope="module")
def impression(lake: Lake) -> dict[str, Any]:
    """A clicked impression of a user with a history."""
    impressions: list[dict[str, Any]] = rows(lake, "impressions")
    lengths = {row["impression_id"]: row["history_length"] for row in rows(lake, "examples")}
    clicked = [row for row in impressions if row["label_click"] and lengths[row["impression_id"]]]
    return random.Random(0).choice(sorted(clicked, key=lambda row: str(row["impression_id"])))


def section(page: str, title: str) -> list[str]:
    """The lines of a section of a page."""
    match = re.search(rf"^{re.escape(title)}.*\n-+\n((?:.+\n)*)", page, re.MULTILINE)
    assert match, title
    return match[1].splitlines()


def test_the_raw_record_is_the_line_of_the_file_that_it_names(
    lake: Lake, impression: dict[str, Any]
) -> None:
    location, record = section(explain_impression(lake, impression["impression_id"]), "raw record")
    path, number = location.rsplit(":", 1)
    with gzip.open(path, "rt") as lines:
        assert next(line for i, line in enumerate(lines, 1) if i == int(number)).strip() == record
    assert Path(path).name.endswith(".json.gz") and impression["impression_id"] in record


def test_the_line_with_the_id_wins_over_an_earlier_one_with_its_parts(
    lake: Lake, tmp_path: Path
) -> None:
    log = tmp_path / "log.json"
    log.write_text('{"user": 7, "item": 12}\n{"id": "7-12"}\n')
    event = {"source_file": str(log), "event_id": "7-12"}
    page = ImpressionPage(lake, event, None, None)
    assert page.raw_record_lines() == [f"{log}:2", '{"id": "7-12"}']
    made_of_columns = ImpressionPage(lake, event | {"event_id": "12-7"}, None, None)
    assert made_of_columns.raw_record_lines()[0] == f"{log}:1"


def test_labels_history_and_attributes_are_as_of_the_impression(
    lake: Lake, impression: dict[str, Any]
) -> None:
    spec, page = lake.spec, explain_impression(lake, impression["impression_id"])
    label_lines = section(page, "labels")
    for line, (name, objective) in zip(label_lines, spec.objectives.items(), strict=True):
        label = impression[f"label_{name}"]
        assert line.startswith(f"{name} within {objective.window // 3600}h: {label}")
        assert exact_utc(impression[f"label_mature_ts_{name}"]) in line
    example = next(
        r for r in rows(lake, "examples") if r["impression_id"] == impression["impression_id"]
    )
    as_of = int(str(example["as_of_ts"]))
    history = reference.visible_history(rows(lake, "events"), impression["user_id"], as_of)
    first, *event_lines = section(page, "history, the last 20 events before it")
    assert first.startswith(f"{len(history)} events in all")
    for line, event in zip(event_lines, history[-20:], strict=True):
        words = line.split()
        assert int(words[0].replace(",", "")) == as_of - event["visible_ts"]
        assert event["item_id"] in words
    versions = snapshot(lake, schemas.attributes(spec, "user")).read().to_pylist()
    versions = [v for v in versions if v["user_id"] == impression["user_id"]]
    earlier = [v for v in versions if v["valid_from"] < impression["event_ts"]]
    newest = max(earlier, key=lambda row: row["valid_from"])
    assert f"country: {newest['attr_country']}" in section(page, "user, as of the impression")


def test_without_models_the_page_shows_none(lake: Lake, impression: dict[str, Any]) -> None:
    page = explain_impression(lake, impression["impression_id"])
    assert section(page, "GEM") == ["none"] and section(page, "ranker") == ["none"]


def test_an_unknown_impression_is_named(lake: Lake) -> None:
    with pytest.raises(UserError, match="no impression 'nowhere'"):
        explain_impression(lake, "nowhere")
