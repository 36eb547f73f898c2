"""A lake under a changed spec is what it would be had it been made under it, for less work."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dags.inputs import inputs_of
from dags.line import Place, data_steps, line, newest_mature
from dags.local import unfinished
from etl.errors import UserError
from etl.spec import load_spec
from etl.tables import records
from etl.tables.lake import Lake
from etl.upgrade import planned
from gemline import main
from tests.conftest import FIRST, LAST
from tests.pipeline import TABLES, build_tables, rows

Change = Callable[[dict[str, Any]], object]


def new_surface(raw: dict[str, Any]) -> None:
    raw["surfaces"]["stories"] = {}


def no_conversions(raw: dict[str, Any]) -> None:
    del raw["objectives"]["conversion"]
    raw["auction"]["pays_for"]["sales"] = "click"


def new_feature(raw: dict[str, Any]) -> None:
    raw["attributes"]["item"]["title_length"] = {"type": "numeric"}


def new_counter(raw: dict[str, Any]) -> None:
    raw["counters"]["windows"].append("2d")


def wider_window(raw: dict[str, Any]) -> None:
    raw["objectives"]["click"]["window"] = "2h"


def all_at_once(raw: dict[str, Any]) -> None:
    for change in (new_surface, no_conversions, new_counter):
        change(raw)


ANEW: dict[Change, set[str]] = {
    new_surface: set(),
    no_conversions: {"impressions"},
    new_feature: {"attributes_item", "item_versions", "examples"},
    new_counter: {"examples"},
    wider_window: {"impressions"},
}


def changed(spec: Path, to: Path, change: Change) -> Path:
    raw = yaml.safe_load(spec.read_text())
    change(raw)
    to.write_text(yaml.safe_dump(raw, sort_keys=False))
    return to


@pytest.mark.parametrize("change", ANEW, ids=lambda change: change.__name__)
def test_only_tables_whose_meaning_changes_are_made_anew(
    lake: Lake, spec_path: Path, tmp_path: Path, change: Change
) -> None:
    new = load_spec(changed(spec_path, tmp_path / "new.yaml", change))
    assert new.hash != lake.spec.hash
    found = planned(lake.root, lake.spec, new)
    assert set(found.anew) == ANEW[change]
    assert set(TABLES) - ANEW[change] <= set(found.kept)


@pytest.mark.parametrize("kind", ["surfaces", "events"])
def test_codes_that_stand_in_tables_are_not_given_away(
    lake: Lake, spec_path: Path, tmp_path: Path, kind: str
) -> None:
    def turned(raw: dict[str, Any]) -> None:
        raw[kind] = dict(reversed(raw[kind].items()))

    new = load_spec(changed(spec_path, tmp_path / "new.yaml", turned))
    with pytest.raises(UserError, match=f"{kind} were .* put new ones behind them"):
        planned(lake.root, lake.spec, new)


@pytest.mark.proof
def test_an_upgraded_lake_is_that_of_the_new_spec(
    lake: Lake, spec_path: Path, raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, days = tmp_path / "lake", f"{FIRST}:{LAST}"
    shutil.copytree(lake.root, own)
    place = Place(spec_path, str(raw), str(own))
    for step in data_steps(place, ("--days", days)):
        steps = line(lake.spec, place, newest_mature(lake.spec, FIRST, LAST))
        records.write(place.lake, step.name, inputs_of(lake.spec, place, steps, step), 1.0)
    path = changed(spec_path, tmp_path / "new.yaml", all_at_once)
    new, there = load_spec(path), Place(path, str(raw), str(own))
    where = ["--spec", str(path), "--lake", str(own), "--raw", str(raw), "--days", days]
    assert main(["upgrade", *where, "--old", str(spec_path)]) == 0
    assert "it skips ingest, attributes, items, history" in capsys.readouterr().out
    assert main(["upgrade", *where, "--old", str(spec_path)]) == 0, "it can be called again"
    steps = line(new, there, newest_mature(new, FIRST, LAST))
    left = [step for step in unfinished(new, there, steps) if step.engine == "spark"]
    assert [step.name for step in left][:2] == ["labels", "examples"]
    for step in left[:2]:
        assert main(step.command) == 0
    made, anew = Lake(str(own), new), Lake(str(tmp_path / "anew"), new)
    build_tables(anew, raw, (FIRST, LAST))
    for name in TABLES:
        assert rows(made, name) == rows(anew, name), name
    assert "conversion" not in str(rows(made, "impressions")[0].keys())
