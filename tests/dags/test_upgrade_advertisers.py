"""Upgrades of specs with audiences, forecasts and campaigns: which tables are rebuilt, by whom."""

import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from etl.spec import load_spec
from etl.tables.audience_schemas import AUDIENCE_SCHEMAS
from etl.tables.forecast_schemas import FORECAST_SCHEMAS
from etl.tables.lake import Lake, create_table
from etl.tables.maintenance import plan_upgrade, upgrade_lake
from etl.tables.roi_schemas import ROI_SCHEMAS
from etl.tables.schemas import table_registry
from tests.dags.test_upgrade import (
    later_delay,
    new_counter,
    new_feature,
    printed_and_pending,
    wider_window,
    write_changed_spec,
)

SpecChange = Callable[[dict[str, Any]], object]
COUNTS, CAMPAIGN_DAYS = (
    {"audience_counts", "audience_quality"},
    {"campaign_days", "response_curves"},
)
LABELS = {"audience_labels", "audience_label_snapshots"}
AUDIENCES = {*LABELS, "audits", *COUNTS}
SCORED = {"forecast_sample", "forecast_margins", "forecast_sketches"}
FORECASTS = {*SCORED, "forecast_supply"}
OF_EVENTS = {*COUNTS, *CAMPAIGN_DAYS, *FORECASTS}


def fewer_providers(spec: dict[str, Any]) -> None:
    spec["audiences"]["age_band"]["providers"].remove("corvid")


def more_providers(spec: dict[str, Any]) -> None:
    spec["audiences"]["age_band"]["providers"].append("dunnock")


def campaigns_by_goal(spec: dict[str, Any]) -> None:
    spec["audiences"]["age_band"]["campaign"] = "goal"


def window_of_audits(spec: dict[str, Any]) -> None:
    spec["audiences"]["age_band"]["window"] = "7d"


def fewer_targeting_attributes(spec: dict[str, Any]) -> None:
    spec["forecast"]["attributes"].remove("tier")


def other_groups(spec: dict[str, Any]) -> None:
    spec["roi"]["groups"] = ["format"]


def window_of_curves(spec: dict[str, Any]) -> None:
    spec["roi"]["window"] = "14d"


def no_audiences(spec: dict[str, Any]) -> None:
    del spec["audiences"], spec["sources"]["audience_labels"], spec["sources"]["audits"]


def no_forecast(spec: dict[str, Any]) -> None:
    del spec["forecast"]


def no_roi(spec: dict[str, Any]) -> None:
    del spec["roi"], spec["sources"]["spend"]


def other_time_zone(spec: dict[str, Any]) -> None:
    spec["time_zone"] = "Europe/Zurich"


def more_lateness(spec: dict[str, Any]) -> None:
    spec["allowed_lateness"] = "3d"


def fewer_events(spec: dict[str, Any]) -> None:
    spec["max_events_per_user_day"] = 99


REBUILT: dict[SpecChange, set[str]] = {
    fewer_providers: AUDIENCES | SCORED,
    more_providers: AUDIENCES | SCORED,
    campaigns_by_goal: COUNTS,
    window_of_audits: {"audience_quality"},
    fewer_targeting_attributes: SCORED,
    other_groups: CAMPAIGN_DAYS,
    window_of_curves: {"response_curves"},
    no_audiences: AUDIENCES | SCORED,
    no_forecast: FORECASTS,
    no_roi: {"campaign_spend", *CAMPAIGN_DAYS},
    wider_window: {*CAMPAIGN_DAYS, *SCORED},
    new_feature: {*COUNTS, *CAMPAIGN_DAYS, *SCORED},
    new_counter: SCORED,
    later_delay: OF_EVENTS,
    more_lateness: OF_EVENTS,
    fewer_events: OF_EVENTS,
    other_time_zone: {*OF_EVENTS, *LABELS},
}


READ_BY_NO_MODEL = {
    *(fewer_providers, more_providers, campaigns_by_goal, window_of_audits),
    *(
        fewer_targeting_attributes,
        other_groups,
        window_of_curves,
        no_audiences,
        no_forecast,
        no_roi,
    ),
}


@pytest.fixture
def own(empty: Lake, tmp_path: Path) -> Lake:
    """A copy of the lake that the test may change."""
    shutil.copytree(empty.root, tmp_path / "lake")
    return Lake(str(tmp_path / "lake"), empty.spec)


def advertiser_tables(lake: Lake) -> set[str]:
    schemas = (*AUDIENCE_SCHEMAS, *FORECAST_SCHEMAS, *ROI_SCHEMAS)
    return {schema(lake.spec).name for schema in schemas}


@pytest.mark.parametrize("change", REBUILT, ids=lambda change: change.__name__)
def test_tables_for_advertisers_are_rebuilt_where_their_content_changes(
    empty: Lake, spec_path: Path, tmp_path: Path, change: SpecChange
) -> None:
    new = load_spec(write_changed_spec(spec_path, tmp_path / "new.yaml", change))
    assert new.hash != empty.spec.hash
    plan = plan_upgrade(empty.root, empty.spec, new)
    tables = advertiser_tables(empty)
    assert tables & set(plan.rebuilt_tables) == REBUILT[change]
    assert tables & set(plan.kept_tables) == tables - REBUILT[change]
    assert ("scores" in plan.kept_tables) == (change in READ_BY_NO_MODEL)


@pytest.mark.parametrize(
    ("change", "steps"),
    [
        (fewer_providers, {"audience", "audience_quality", "forecast"}),
        (campaigns_by_goal, {"audience", "audience_quality", "forecast"}),
        (other_groups, {"campaign_days", "response_curves", "forecast"}),
        (fewer_targeting_attributes, {"forecast"}),
        (wider_window, {"campaign_days", "response_curves", "forecast"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_next_run_rebuilds_the_tables_that_an_upgrade_removed(
    tmp_path: Path,
    spec_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: SpecChange,
    steps: set[str],
) -> None:
    """The forecast's step runs with the scores of the new spec's rankers."""
    printed, _, pending = printed_and_pending(tmp_path, capsys, change, old_path=spec_path)
    of_advertisers = {
        *("audience", "audience_quality", "campaign_days", "response_curves", "forecast"),
    }
    assert of_advertisers & {step.name for step in pending} == steps
    assert of_advertisers & set(printed) == of_advertisers - steps


@pytest.mark.parametrize("removed", [no_audiences, no_forecast, no_roi])
def test_a_section_can_be_removed_and_added_again(
    own: Lake, spec_path: Path, tmp_path: Path, removed: SpecChange
) -> None:
    """Between these, the spec changes in another way: no table stays that it does not know."""

    def both(spec: dict[str, Any]) -> None:
        removed(spec)
        new_counter(spec)

    specs = [own.spec]
    for number, change in enumerate((removed, both, new_counter)):
        specs.append(load_spec(write_changed_spec(spec_path, tmp_path / f"{number}.yaml", change)))
    for old, new in pairwise(specs):
        upgrade_lake(own.root, old, new)
        unknown = set(table_registry(own.spec)) - set(table_registry(new))
        assert not any(map(own.exists, unknown))
    lake = Lake(own.root, specs[-1])
    for schema in table_registry(lake.spec).values():
        create_table(lake, schema)
        assert lake.open(schema.name).version() >= 0
