"""Upgrades keep what GEM predicted before it learned a day: it cannot be predicted again."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from etl.spec import load_spec
from etl.spec.effects import TEACHER_TABLES
from etl.tables.lake import Lake
from etl.tables.maintenance import plan_upgrade
from etl.tables.schemas import table_registry
from gemline import main
from tests.conftest import FIRST, LAST
from tests.dags.test_upgrade import (
    SpecChange,
    later_delay,
    new_auxiliary_objective,
    new_counter,
    new_feature,
    new_surface,
    no_conversions,
    other_bid,
    refunds,
    surface_and_similarity,
    wider_window,
    write_changed_spec,
)
from tests.dags.test_upgrade_advertisers import fewer_events, more_lateness, other_time_zone
from tests.pipeline import rows
from training.distributed.process_group import process_group
from training.teacher.embeddings import load_teacher_embeddings
from training.teacher.outputs import write_teacher_outputs
from training.teacher.predictions import TeacherPredictions

PREDICTIONS, _ = TEACHER_TABLES


def new_user_attribute(spec: dict[str, Any]) -> None:
    spec["attributes"]["user"]["age"] = {"type": "numeric"}


def new_context_attribute(spec: dict[str, Any]) -> None:
    spec["attributes"]["context"]["battery"] = {"type": "numeric"}


def new_objective(spec: dict[str, Any]) -> None:
    spec["objectives"]["view"] = {"event": "ad_view", "window": "1h"}


def longer_grace_period(spec: dict[str, Any]) -> None:
    spec["objectives"]["click"]["label_grace_period"] = "1h"


def more_buckets(spec: dict[str, Any]) -> None:
    spec["buckets"] = 8


def more_buckets_and_surface(spec: dict[str, Any]) -> None:
    more_buckets(spec)
    new_surface(spec)


def more_buckets_and_counter(spec: dict[str, Any]) -> None:
    more_buckets(spec)
    new_counter(spec)


KEEP_BOTH = (
    *(new_counter, new_feature, new_user_attribute, new_context_attribute, new_surface),
    *(surface_and_similarity, other_bid, new_auxiliary_objective, longer_grace_period),
    *(more_buckets, more_buckets_and_surface),
)
REMOVE_PREDICTIONS = (new_objective, no_conversions, wider_window, more_buckets_and_counter)
REMOVE_BOTH = (later_delay, more_lateness, fewer_events, other_time_zone, refunds)
REBUILT: dict[SpecChange, set[str]] = {
    **{change: set() for change in KEEP_BOTH},
    **{change: {PREDICTIONS} for change in REMOVE_PREDICTIONS},
    **{change: {*TEACHER_TABLES} for change in REMOVE_BOTH},
}


@pytest.mark.parametrize("change", REBUILT, ids=lambda change: change.__name__)
def test_outputs_of_gem_are_removed_with_their_impressions_or_objectives_only(
    empty: Lake, spec_path: Path, tmp_path: Path, change: SpecChange
) -> None:
    """Of other buckets, predictions follow the examples, so that they need them."""
    old = empty.spec
    new = load_spec(write_changed_spec(spec_path, tmp_path / "new.yaml", change))
    plan = plan_upgrade(empty.root, old, new)
    assert {*TEACHER_TABLES} & {*plan.rebuilt_tables} == REBUILT[change]
    kept = {*TEACHER_TABLES} - REBUILT[change]
    before, after = table_registry(old), table_registry(new)
    assert all(before[name].columns == after[name].columns for name in kept)
    is_moved = old.buckets != new.buckets
    assert kept <= {*(plan.repartitioned_tables if is_moved else plan.kept_tables)}


def test_after_an_upgrade_students_learn_what_earlier_gems_predicted(
    own_gem_lake: Lake, spec_path: Path, raw: Path, tmp_path: Path
) -> None:
    """The only GEM that is left has learned all but the last day, so it could not predict them."""
    before = {name: rows(own_gem_lake, name) for name in TEACHER_TABLES}
    days = [FIRST + timedelta(days=n) for n in range((LAST - FIRST).days + 1)]
    known = TeacherPredictions.of_gem(own_gem_lake, days)
    embeddings = load_teacher_embeddings(own_gem_lake)
    path = write_changed_spec(spec_path, tmp_path / "new.yaml", new_counter)
    flags, last = ["--spec", str(path), "--lake", own_gem_lake.root], LAST - timedelta(days=1)
    command = ["upgrade", *flags, "--raw", str(raw), "--old-spec", str(spec_path), "--yes"]
    assert main([*command, "--days", f"{FIRST}:{LAST}"]) == 0
    assert main(["teacher-predictions", *flags, "--days", f"{FIRST}:{last}"]) == 0
    upgraded = Lake(own_gem_lake.root, load_spec(path))
    assert not upgraded.exists("examples")
    assert {name: rows(upgraded, name) for name in TEACHER_TABLES} == before
    stored = TeacherPredictions.of_gem(upgraded, days)
    assert len(stored.impression_ids) and (stored.impression_ids == known.impression_ids).all()
    assert len(load_teacher_embeddings(upgraded).users) == len(embeddings.users) > 0


def test_with_a_longer_teacher_lag_rows_of_a_newer_gem_are_not_kept(own_gem_lake: Lake) -> None:
    """No GEM is old enough for them: the day has no rows then, instead of those of a newer one."""
    assert all(own_gem_lake.rows_by_day(name)[LAST] for name in TEACHER_TABLES)
    with process_group():
        assert write_teacher_outputs(own_gem_lake, (LAST, LAST), teacher_lag_days=9) == 0
    assert not any(own_gem_lake.rows_by_day(name).get(LAST) for name in TEACHER_TABLES)
