"""Which days a refresh of the current day rewrites, and when it waits for a daily run."""

import time
from datetime import date, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from dags.orchestration.refresh import reason_to_skip
from dags.orchestration.runs import PipelineRun
from dags.refresh import plan_refresh, refresh_steps
from dags.steps import PipelinePaths
from etl.cli.runner import format_data_until, parse_data_until
from etl.errors import UserError
from etl.ingest.arrival import day_file_states, record_ingested_files
from etl.spec import DataSpec, load_spec
from etl.spec.units import date_range
from etl.tables.day_order import TABLES_OF_STEPS, days_in_order, reopen_days
from etl.tables.lake import Lake
from gemline import main
from tests.cli import parse_command
from tests.conftest import FIRST, SPEC

DAYS = [FIRST + timedelta(days=n) for n in range(4)]
TODAY = DAYS[-1]


@pytest.fixture(scope="module")
def spec() -> DataSpec:
    return load_spec(SPEC)


def deliver(raw: Path, source: str, day: date, content: str = "") -> None:
    """Write the file of a source and day."""
    folder = raw / source / (f"day={day}" if source == "events" else "")
    folder.mkdir(parents=True, exist_ok=True)
    name = "part.json.gz" if source == "events" else f"day={day}.json.gz"
    (folder / name).write_text(content)


@pytest.fixture
def folder(tmp_path: Path, spec: DataSpec) -> Path:
    """Raw logs of all days, of which all but the last have been ingested."""
    raw = tmp_path / "raw"
    for day in DAYS:
        for source in ("events", "users", "items"):
            deliver(raw, source, day)
    states = {day: day_file_states(spec, str(raw), day) for day in DAYS[:-1]}
    record_ingested_files(str(tmp_path / "lake"), states)
    return tmp_path


def noon(spec: DataSpec) -> int:
    return spec.day_start(TODAY) + 12 * 3600


def planned_days(spec: DataSpec, folder: Path) -> str:
    return plan_refresh(spec, str(folder / "raw"), str(folder / "lake"), noon(spec)).days


def test_a_refresh_rewrites_the_current_day(spec: DataSpec, folder: Path) -> None:
    assert planned_days(spec, folder) == f"{TODAY}:{TODAY}"
    states = {TODAY: day_file_states(spec, str(folder / "raw"), TODAY)}
    record_ingested_files(str(folder / "lake"), states)  # by an earlier refresh
    deliver(folder / "raw", "events", TODAY, "more")
    assert planned_days(spec, folder) == f"{TODAY}:{TODAY}"


def test_a_refresh_reads_files_of_earlier_days_that_came_later(
    spec: DataSpec, folder: Path
) -> None:
    deliver(folder / "raw", "events", DAYS[-2], "late")
    assert planned_days(spec, folder) == f"{DAYS[-2]}:{TODAY}"


def test_a_refresh_reads_days_that_no_run_has_read(spec: DataSpec, folder: Path) -> None:
    for day in DAYS[2:]:
        (folder / "lake" / "_pipeline" / "raw_files" / f"{day}.json").unlink(missing_ok=True)
    assert planned_days(spec, folder) == f"{DAYS[2]}:{TODAY}"
    for day in date_range(FIRST, TODAY):
        (folder / "lake" / "_pipeline" / "raw_files" / f"{day}.json").unlink(missing_ok=True)
    with pytest.raises(UserError, match="has been ingested: process whole days"):
        planned_days(spec, folder)


def test_a_refresh_repeats_days_that_an_interrupted_one_left_unfinished(
    spec: DataSpec, folder: Path
) -> None:
    """The interrupted one read late files, so that these are no longer new."""
    lake = Lake(str(folder / "lake"), spec)
    steps = [step for step in TABLES_OF_STEPS if step != "attributes"]
    for step in TABLES_OF_STEPS:
        with days_in_order(lake, step, (FIRST, DAYS[-2])):
            pass
    assert planned_days(spec, folder) == f"{TODAY}:{TODAY}"
    reopen_days(spec, lake.root, DAYS[-2])  # by the ingest of the interrupted refresh
    assert planned_days(spec, folder) == f"{DAYS[-2]}:{TODAY}"
    for step in steps:
        with days_in_order(lake, step, (DAYS[-2], TODAY)):
            pass
    assert planned_days(spec, folder) == f"{DAYS[-2]}:{TODAY}", "attributes were not read"


def test_sources_without_files_yet_are_missing(spec: DataSpec, folder: Path) -> None:
    (folder / "raw" / "users" / f"day={TODAY}.json.gz").unlink()
    plan = plan_refresh(spec, str(folder / "raw"), str(folder / "lake"), noon(spec))
    assert plan.missing_sources == "users"
    (folder / "raw" / "events" / f"day={TODAY}" / "part.json.gz").unlink()
    with pytest.raises(UserError, match=f"no log of {TODAY} yet"):
        planned_days(spec, folder)


def test_steps_of_a_refresh_name_its_days_and_its_end(spec: DataSpec, folder: Path) -> None:
    (folder / "lake" / "rankers" / "feed").mkdir(parents=True)
    (folder / "lake" / "rankers" / "feed" / "current.json").touch()
    plan = plan_refresh(spec, str(folder / "raw"), str(folder / "lake"), noon(spec))
    assert plan.surfaces == ("feed",)
    steps = refresh_steps(spec, PipelinePaths(SPEC, "raw", "lake"), plan)
    arguments = {step.name: dict(parse_command(step.command)) for step in steps}
    assert {"audience", "campaign_days"} < arguments.keys(), (
        "the daily run does not read them again"
    )
    assert not {"audience_quality", "response_curves"} & arguments.keys()
    assert all("missing_sources" in arguments[s.name] for s in steps if "raw" in s.reads)
    assert [*arguments][-3:] == ["teacher_predictions", "refit-feed", "feature_store"]
    for name, values in arguments.items():
        assert values.get("days", plan.days) == plan.days, name
    for name in ("labels", "refit-feed", "feature_store"):
        assert parse_data_until(spec, str(arguments[name]["data_until"])) == noon(spec)
    assert arguments["feature_store"]["keep_newer"]


def test_times_are_in_the_time_zone_of_the_spec(spec: DataSpec) -> None:
    berlin = spec.model_copy(update={"time_zone": "Europe/Berlin"})
    assert parse_data_until(berlin, f"{TODAY}T12:00") == noon(spec) - 3600
    assert parse_data_until(berlin, f"{TODAY}") == berlin.day_end(TODAY)
    assert berlin.last_day_before(berlin.day_end(TODAY)) == TODAY
    for text in ("yesterday", "2026-01-04T25:00", "12:00", "9999-12-31"):
        with pytest.raises(UserError, match="write a day or a time"):
            parse_data_until(berlin, text)


def test_data_end_now_at_the_latest(spec: DataSpec) -> None:
    """The labels of a day that is not over would miss the outcomes of the rest of the day."""
    kiritimati = spec.model_copy(update={"time_zone": "Pacific/Kiritimati"})
    for zone in (spec, kiritimati):
        now = int(time.time())
        today = zone.day_of(now)
        yesterday = today - timedelta(days=1)
        assert parse_data_until(zone, f"{yesterday}") == zone.day_end(yesterday)
        assert parse_data_until(zone, format_data_until(now)) == now
        for text in (f"{today}", f"{today + timedelta(days=1)}", format_data_until(now + 60)):
            with pytest.raises(UserError, match="ends in the future: write a day that is over"):
                parse_data_until(zone, text)


def test_a_run_ends_with_a_day_that_is_over(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    today = load_spec(SPEC).day_of(int(time.time()))
    flags = ["--spec", str(SPEC), "--raw", str(folder / "raw"), "--lake", str(folder / "lake")]
    assert main(["run", *flags, "--days", f"{today - timedelta(days=30)}:{today}"]) == 2
    assert f"{today} is not over" in capsys.readouterr().err


def test_a_refresh_follows_the_daily_run_of_the_day_before(spec: DataSpec) -> None:
    def skips(data_until: int, *finished: date) -> bool:
        events = [
            SimpleNamespace(extra=PipelineRun(first=day, new_from=day, last=day).model_dump())
            for day in finished
        ]
        return reason_to_skip(spec, data_until, events) is not None

    assert not skips(noon(spec), *DAYS[:-1])
    assert skips(noon(spec), *DAYS[:-2])  # its daily run is still running
    assert skips(noon(spec))
    assert skips(noon(spec), *DAYS)  # its own daily run has finished
    assert skips(spec.day_end(TODAY), *DAYS[:-1])  # the daily run writes whole days
