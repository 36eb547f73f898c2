"""An upgraded lake equals one built from scratch with the new spec; unaffected tables are kept."""

import shutil
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from dags.pipeline import data_steps, latest_mature_split, pipeline_steps
from dags.runner import input_fingerprint, pending_steps
from dags.steps import PipelinePaths, Step
from etl.errors import UserError
from etl.spec import load_spec
from etl.tables import step_state
from etl.tables.lake import Lake, create_table
from etl.tables.maintenance import plan_upgrade, upgrade_lake
from etl.tables.schemas import table_registry
from gemline import main
from tests.conftest import FIRST, GEM_FLAGS, LAST
from tests.dags.test_pipeline import finish
from tests.etl.test_last_touch import write_spec
from tests.features.histograms import write_statistics
from tests.pipeline import TABLES, build_tables, rows

SpecChange = Callable[[dict[str, Any]], object]


def new_surface(spec: dict[str, Any]) -> None:
    spec["surfaces"]["stories"] = {}


def surface_and_similarity(spec: dict[str, Any]) -> None:
    new_surface(spec)
    spec["similarity_attributes"].append("format")


def no_conversions(spec: dict[str, Any]) -> None:
    del spec["objectives"]["conversion"], spec["roi"], spec["sources"]["spend"]
    spec["auction"]["goal_objectives"]["sales"] = "click"
    del spec["auction"]["target_roas"]


def new_feature(spec: dict[str, Any]) -> None:
    spec["attributes"]["item"]["title_length"] = {"type": "numeric"}


def new_counter(spec: dict[str, Any]) -> None:
    spec["counters"]["windows"].append("2d")


def wider_window(spec: dict[str, Any]) -> None:
    spec["objectives"]["click"]["window"] = "2h"


def new_auxiliary_objective(spec: dict[str, Any]) -> None:
    spec["auxiliary_objectives"]["view"] = {"event": "ad_view", "window": "1h"}


def later_delay(spec: dict[str, Any]) -> None:
    spec["sources"]["events"]["delay"] = "7m"


def other_bid(spec: dict[str, Any]) -> None:
    spec["auction"]["bid"] = "other_bid"


def refunds(spec: dict[str, Any]) -> None:
    spec["events"]["refund"] = {"role": "retraction"}
    spec["sources"]["events"]["columns"]["retracts"] = "refunded_id"
    spec["objectives"]["conversion"]["retracted_by"] = {"event": "refund", "within": "2d"}


def all_at_once(spec: dict[str, Any]) -> None:
    for change in (new_surface, no_conversions, new_counter):
        change(spec)


ITEM_ATTRIBUTES = {"attributes_item", "attributes_item_snapshots"}
REBUILT_TABLES: dict[SpecChange, set[str]] = {
    new_surface: set(),
    no_conversions: {"impressions", *ITEM_ATTRIBUTES},  # and targets of their return
    new_feature: {*ITEM_ATTRIBUTES, "item_versions", "first_item_versions", "examples"}
    | {"audience_counts"},  # an attribute of items names the campaigns
    new_counter: {"examples"},
    wider_window: {"impressions"},
    new_auxiliary_objective: {"impressions"},
    later_delay: {*TABLES, "audience_counts"} - {"items", "quarantine"},
    other_bid: ITEM_ATTRIBUTES,
    refunds: {*TABLES, "audience_counts"}
    - {"items", "quarantine", "item_versions", "first_item_versions"}
    - {f"attributes_{name}" for name in ("user", "item", "user_snapshots", "item_snapshots")},
}


def write_changed_spec(spec_path: Path, new_path: Path, change: SpecChange) -> Path:
    spec = yaml.safe_load(spec_path.read_text())
    change(spec)
    new_path.write_text(yaml.safe_dump(spec, sort_keys=False))
    return new_path


@pytest.mark.parametrize("change", REBUILT_TABLES, ids=lambda change: change.__name__)
def test_only_tables_whose_content_changes_are_rebuilt(
    lake: Lake, spec_path: Path, tmp_path: Path, change: SpecChange
) -> None:
    new = load_spec(write_changed_spec(spec_path, tmp_path / "new.yaml", change))
    assert new.hash != lake.spec.hash
    plan = plan_upgrade(lake.root, lake.spec, new)
    assert set(plan.rebuilt_tables) == REBUILT_TABLES[change]
    assert set(TABLES) - REBUILT_TABLES[change] <= set(plan.kept_tables)


def test_late_retractions_are_removed_with_their_objective(spec_path: Path, tmp_path: Path) -> None:
    """Later, no step would know the table, nor erase users from it."""
    old = load_spec(write_changed_spec(spec_path, tmp_path / "old.yaml", refunds))
    lake = Lake(str(tmp_path / "lake"), old)
    create_table(lake, table_registry(old)["late_retractions"])

    def no_longer(spec: dict[str, Any]) -> None:
        refunds(spec)
        del spec["objectives"]["conversion"]["retracted_by"]

    new = load_spec(write_changed_spec(spec_path, tmp_path / "new.yaml", no_longer))
    assert upgrade_lake(lake.root, old, new).rebuilt_tables == ("late_retractions",)
    assert not lake.exists("late_retractions")


def test_nothing_is_removed_without_confirmation(
    own: Lake, spec_path: Path, raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_changed_spec(spec_path, tmp_path / "new.yaml", new_counter)
    flags = ["--spec", str(path), "--lake", own.root, "--raw", str(raw)]
    command = ["upgrade", *flags, "--days", f"{FIRST}:{LAST}", "--old-spec", str(spec_path)]
    assert main(command) == 2
    output = capsys.readouterr()
    assert "changed keys: counters.windows" in output.out
    assert "removed, to be rebuilt: examples\n" in output.out
    assert "pass --yes" in output.err
    assert own.version("examples") >= 0


def test_wrong_days_are_refused_before_anything_is_removed(
    own: Lake, spec_path: Path, raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_changed_spec(spec_path, tmp_path / "new.yaml", new_counter)
    flags = ["--spec", str(path), "--lake", own.root, "--raw", str(raw)]
    command = ["upgrade", *flags, "--old-spec", str(spec_path), "--yes", "--days"]
    for days, message in ((f"{FIRST}:{FIRST}", "is too short"), ("yesterday", "yesterday")):
        assert main([*command, days]) == 2
        assert message in capsys.readouterr().err
    assert own.version("examples") >= 0


def test_an_upgrade_asks_for_confirmation_on_a_terminal(
    own: Lake, spec_path: Path, raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_changed_spec(spec_path, tmp_path / "new.yaml", new_counter)
    flags = ["--spec", str(path), "--lake", own.root, "--raw", str(raw)]
    command = ["upgrade", *flags, "--days", f"{FIRST}:{LAST}", "--old-spec", str(spec_path)]
    write_statistics(own, FIRST, [np.ones(9, int)])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    rebuilt = ("examples", "feature_statistics")
    for answer in ("", "n", "perhaps"):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        assert main(command) == 2 and all(map(own.exists, rebuilt))
    monkeypatch.setattr("builtins.input", lambda question: " Yes ")
    assert main(command) == 0 and not any(map(own.exists, rebuilt))


def printed_and_pending(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: SpecChange,
    finished_until: date = LAST,
    old_path: Path | None = None,
) -> tuple[list[str], list[Step], list[Step]]:
    """What an upgrade prints as skipped, all steps, and the pending ones, after a finished run."""
    old_path = old_path or write_spec(tmp_path)
    lake = Lake(str(tmp_path / "lake"), load_spec(old_path))
    for schema in table_registry(lake.spec).values():
        create_table(lake, schema)
    old_paths = PipelinePaths(old_path, str(tmp_path), lake.root)
    split = latest_mature_split(lake.spec, FIRST, LAST)
    finished = split.model_copy(update={"data_until": finished_until})
    finish(lake.spec, old_paths, pipeline_steps(lake.spec, old_paths, finished))
    path = write_changed_spec(old_path, tmp_path / "new.yaml", change)
    new, paths = load_spec(path), PipelinePaths(path, str(tmp_path), lake.root)
    flags = ["--spec", str(path), "--lake", lake.root, "--raw", str(tmp_path)]
    command = ["upgrade", *flags, "--days", f"{FIRST}:{LAST}", "--old-spec", str(old_path)]
    assert main([*command, "--yes"]) == 0
    printed = capsys.readouterr().out.strip().rpartition("it skips ")[2].split(", ")
    steps = pipeline_steps(new, paths, split, ("--scale", "small"))
    return printed, steps, pending_steps(new, paths, steps)


@pytest.mark.parametrize("change", [new_surface, new_feature])
def test_an_upgrade_prints_the_steps_that_the_next_run_skips(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: SpecChange
) -> None:
    """Ingest runs again after attributes of items, by which conversions follow touches."""
    printed, steps, pending = printed_and_pending(tmp_path, capsys, change)
    assert ("ingest" in [step.name for step in pending]) == (change is new_feature)
    skipped = [step.name for step in steps if step not in pending]
    assert printed == (skipped or ["nothing"])


def test_steps_that_had_not_finished_run_after_an_upgrade(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last run had one day less, so that no table has the last day."""
    before = LAST - timedelta(days=1)
    printed, steps, pending = printed_and_pending(tmp_path, capsys, new_surface, before)
    assert printed == ["nothing"] and pending == steps


def test_the_meaning_of_stored_codes_cannot_be_changed(
    lake: Lake, spec_path: Path, tmp_path: Path
) -> None:
    def without_ads(spec: dict[str, Any]) -> None:
        spec["surfaces"]["messaging"]["ads"] = False
        spec["domains"] = {}

    def without_an_event(spec: dict[str, Any]) -> None:
        del spec["events"]["post_view"]
        spec["counters"]["events"].remove("post_view")

    for change, message in (
        (without_ads, "messaging was ads: True"),
        (without_an_event, "post_view is missing"),
    ):
        new = load_spec(write_changed_spec(spec_path, tmp_path / "new.yaml", change))
        with pytest.raises(UserError, match=message):
            plan_upgrade(lake.root, lake.spec, new)


def test_an_upgrade_carries_gem_over_and_training_continues(
    own_gem_lake: Lake,
    spec_path: Path,
    raw: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The GEM of the day before the last predicts under the new spec, and trains on the next."""
    path = write_changed_spec(spec_path, tmp_path / "new.yaml", surface_and_similarity)
    flags = ["--spec", str(path), "--lake", own_gem_lake.root]
    train = ["train", "gem", *flags, "--days", str(LAST), *GEM_FLAGS]
    assert main(train) == 2 and "was written under" in capsys.readouterr().err
    command = ["upgrade", *flags, "--raw", str(raw), "--old-spec", str(spec_path), "--yes"]
    command += ["--days", f"{FIRST}:{LAST}"]
    assert main(command) == 0
    output = capsys.readouterr().out
    assert "added: surface stories; similarity attribute item_format" in output
    assert "dropped: nothing\npredictions for requests of the old spec: equal" in output
    assert main(command) == 0, "it can be called again"
    assert "added: nothing" in capsys.readouterr().out
    assert main(["teacher-predictions", *flags, "--days", str(LAST)]) == 0
    assert main(train) == 0
    folders = {folder.name for folder in Path(own_gem_lake.root, "models", "gem").iterdir()}
    assert folders == {str(LAST - timedelta(days=1)), str(LAST)}


@pytest.mark.proof
def test_an_upgraded_lake_equals_one_built_under_the_new_spec(
    lake: Lake, spec_path: Path, raw: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    upgraded_root, days = tmp_path / "lake", f"{FIRST}:{LAST}"
    shutil.copytree(lake.root, upgraded_root)
    old_paths = PipelinePaths(spec_path, str(raw), str(upgraded_root))
    for step in data_steps(lake.spec, old_paths, ("--days", days)):
        steps = pipeline_steps(lake.spec, old_paths, latest_mature_split(lake.spec, FIRST, LAST))
        fingerprint = input_fingerprint(lake.spec, old_paths, steps, step)
        step_state.write_step_state(old_paths.lake, step.name, fingerprint, 1.0)
    path = write_changed_spec(spec_path, tmp_path / "new.yaml", all_at_once)
    new, paths = load_spec(path), PipelinePaths(path, str(raw), str(upgraded_root))
    flags = ["--spec", str(path), "--lake", paths.lake, "--raw", str(raw), "--days", days]
    command = ["upgrade", *flags, "--old-spec", str(spec_path), "--yes"]
    assert main(command) == 0
    assert "it skips ingest\n" in capsys.readouterr().out
    assert main(command) == 0, "it can be called again"
    steps = pipeline_steps(new, paths, latest_mature_split(new, FIRST, LAST))
    pending = [step for step in pending_steps(new, paths, steps) if step.engine == "spark"]
    assert [step.name for step in pending][:3] == ["attributes", "labels", "items"]
    for step in pending:
        if step.name in {"attributes", "labels", "items", "history", "examples"}:
            assert main(step.command) == 0
    upgraded, rebuilt = Lake(paths.lake, new), Lake(str(tmp_path / "rebuilt"), new)
    build_tables(rebuilt, raw, (FIRST, LAST))
    for name in TABLES:
        assert rows(upgraded, name) == rows(rebuilt, name), name
    assert "conversion" not in str(rows(upgraded, "impressions")[0].keys())
