"""The page on one impression says what the naive references say, and where its record lies."""

import gzip
import random
import re
from pathlib import Path

import pytest

from etl.errors import UserError
from etl.tables import contracts
from etl.tables.arrow import snapshot
from etl.tables.lake import Lake
from features import reference
from ranking.explain import explain, time_of
from tests.pipeline import rows


@pytest.fixture(scope="module")
def shown(lake: Lake) -> dict:
    """An impression that was clicked, of a user with a past."""
    impressions = {row["impression_id"]: row for row in rows(lake, "impressions")}
    lengths = {row["impression_id"]: row["hist_len"] for row in rows(lake, "examples")}
    clicked = [r for r in impressions.values() if r["label_click"] and lengths[r["impression_id"]]]
    return random.Random(0).choice(sorted(clicked, key=lambda row: row["impression_id"]))


def section(page: str, title: str) -> list[str]:
    found = re.search(rf"^{re.escape(title)}.*\n-+\n((?:.+\n)*)", page, re.MULTILINE)
    assert found, title
    return found[1].splitlines()


def test_the_raw_record_is_the_line_of_the_file_that_it_names(lake: Lake, shown: dict) -> None:
    place, record = section(explain(lake, shown["impression_id"]), "raw record")
    path, number = place.rsplit(":", 1)
    with gzip.open(path, "rt") as lines:
        assert next(line for i, line in enumerate(lines, 1) if i == int(number)).strip() == record
    assert Path(path).name.endswith(".json.gz") and shown["impression_id"] in record


def test_labels_history_and_attributes_are_those_of_then(lake: Lake, shown: dict) -> None:
    spec, page = lake.spec, explain(lake, shown["impression_id"])
    said = section(page, "labels")
    for line, (name, objective) in zip(said, spec.objectives.items(), strict=True):
        label = shown[f"label_{name}"]
        assert line.startswith(f"{name} within {objective.window // 3600}h: {label}")
        assert time_of(shown[f"ready_{name}"]) in line
    example = next(
        r for r in rows(lake, "examples") if r["impression_id"] == shown["impression_id"]
    )
    seen = reference.history(rows(lake, "events"), shown["user_id"], example["as_of_ts"])
    first, *events = section(page, "history, the last 20 events before it")
    assert first.startswith(f"{len(seen)} events in all")
    for line, event in zip(events, seen[-20:], strict=True):
        words = line.split()
        assert int(words[0].replace(",", "")) == example["as_of_ts"] - event["visible_ts"]
        assert event["item_id"] in words
    versions = snapshot(lake, contracts.attributes(spec, "user")).read().to_pylist()
    held = [v for v in versions if v["user_id"] == shown["user_id"]]
    held = [v for v in held if v["valid_from"] < shown["event_ts"]]
    newest = max(held, key=lambda row: row["valid_from"])
    assert f"country: {newest['x_country']}" in section(page, "user, as of then")


def test_without_models_the_page_says_none(lake: Lake, shown: dict) -> None:
    page = explain(lake, shown["impression_id"])
    assert section(page, "GEM") == ["none"] and section(page, "ranker") == ["none"]


def test_an_unknown_impression_is_named(lake: Lake) -> None:
    with pytest.raises(UserError, match="no impression 'nowhere'"):
        explain(lake, "nowhere")
