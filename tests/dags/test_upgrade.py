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
from etl.upgrade import plan_upgrade
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


def later_delay(raw: dict[str, Any]) -> None:
    raw["sources"]["events"]["delay"] = "7m"


def other_bid(raw: dict[str, Any]) -> None:
    raw["auction"]["bid"] = "other_bid"


def all_at_once(raw: dict[str, Any]) -> None:
    for change in (new_surface, no_conversions, new_counter):
        change(raw)


ANEW: dict[Change, set[str]] = {
    new_surface: set(),
    no_conversions: {"impressions"},
    new_feature: {"attributes_item", "item_versions", "examples"},
    new_counter: {"examples"},
    wider_window: {"impressions"},
    later_delay: {*TABLES, "attributes_user", "attributes_item"} - {"items", "quarantine"},
    other_bid: {"attributes_item"},
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
    found = plan_upgrade(lake.root, lake.spec, new)
    assert set(found.rebuilt) == ANEW[change]
    assert set(TABLES) - ANEW[change] <= set(found.kept)


def test_nothing_is_removed_without_a_yes(
    own: Lake, spec_path: Path, raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = changed(spec_path, tmp_path / "new.yaml", new_counter)
    where = ["--spec", str(path), "--lake", own.root, "--raw", str(raw)]
    command = ["upgrade", *where, "--days", f"{FIRST}:{LAST}", "--old", str(spec_path)]
    assert main(command) == 2
    output = capsys.readouterr()
    assert "changed keys: counters.windows" in output.out
    assert "removed, to be rebuilt: examples, GEM" in output.out
    assert "add --yes" in output.err
    assert own.version("examples") >= 0


def test_an_upgrade_asks_on_a_terminal(
    own: Lake, spec_path: Path, raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = changed(spec_path, tmp_path / "new.yaml", new_counter)
    where = ["--spec", str(path), "--lake", own.root, "--raw", str(raw)]
    command = ["upgrade", *where, "--days", f"{FIRST}:{LAST}", "--old", str(spec_path)]
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    for answer in ("", "n", "perhaps"):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        assert main(command) == 2 and own.exists("examples")
    monkeypatch.setattr("builtins.input", lambda question: " Yes ")
    assert main(command) == 0 and not own.exists("examples")


def test_what_codes_in_tables_stand_for_cannot_be_changed(
    lake: Lake, spec_path: Path, tmp_path: Path
) -> None:
    def without_ads(raw: dict[str, Any]) -> None:
        raw["surfaces"]["messaging"]["ads"] = False
        raw["domains"] = {}

    def without_a_type(raw: dict[str, Any]) -> None:
        del raw["events"]["post_view"]
        raw["counters"]["events"].remove("post_view")

    for change, sentence in (
        (without_ads, "messaging was ads: True"),
        (without_a_type, "post_view is missing"),
    ):
        new = load_spec(changed(spec_path, tmp_path / "new.yaml", change))
        with pytest.raises(UserError, match=sentence):
            plan_upgrade(lake.root, lake.spec, new)


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
    assert main(["upgrade", *where, "--old", str(spec_path), "--yes"]) == 0
    assert "it skips ingest, attributes, items, history" in capsys.readouterr().out
    assert main(["upgrade", *where, "--old", str(spec_path), "--yes"]) == 0, (
        "it can be called again"
    )
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
