"""Which days a run processes when logs arrive late, change, or never arrive."""

import time
from collections.abc import Iterable
from datetime import date, timedelta
from itertools import product
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dags.orchestration.runs import PipelineRun, plan_run
from etl.errors import UserError
from etl.ingest.arrival import (
    day_file_states,
    has_arrived,
    record_ingested_files,
    required_daily_sources,
)
from etl.spec import DataSpec, load_spec
from etl.spec.units import date_range
from etl.tables.day_order import days_in_order
from etl.tables.lake import Lake
from tests.conftest import FIRST, short_spec

SURFACES = ("feed", "reels", "messaging")
DAYS = [FIRST + timedelta(days=n) for n in range(8)]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    """A spec with a log per surface, and attributes that are not daily."""
    content = yaml.safe_load(short_spec())
    log = content["sources"].pop("events")
    for name in ("audience_labels", "audits", "spend"):
        del content["sources"][name]
    del content["audiences"], content["roi"]
    for source in content["sources"].values():
        source["path"] = source["path"].replace("day={day}", "all")
    content["sources"] |= {name: log | {"path": f"{name}/day={{day}}/*.json"} for name in SURFACES}
    path = tmp_path_factory.mktemp("spec") / "three.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return load_spec(path)


def deliver(raw: Path, surface: str, day: date) -> None:
    """Write the file of a surface and day."""
    file = raw / surface / f"day={day}" / "part.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()


def record_ingest(spec: DataSpec, folder: Path, run: PipelineRun) -> None:
    """Record what an ingest of a run would have read."""
    days = date_range(run.first, run.last)
    states = {day: day_file_states(spec, str(folder / "raw"), day) for day in days}
    record_ingested_files(str(folder / "lake"), states)


def run_of(day: date) -> PipelineRun:
    return PipelineRun(first=day, new_from=day, last=day)


def plan(spec: DataSpec, folder: Path, day: date) -> PipelineRun:
    return plan_run(spec, str(folder / "raw"), str(folder / "lake"), run_of(day))


def run_daily(
    spec: DataSpec, folder: Path, arrivals: Iterable[set[tuple[str, date]]]
) -> list[PipelineRun]:
    """The run of each day, given the (surface, day) whose files arrive before it starts."""
    runs: list[PipelineRun] = []
    for today, arrived in zip(DAYS, arrivals, strict=False):
        for surface, day in arrived:
            deliver(folder / "raw", surface, day)
        runs.append(plan(spec, folder, today))
        record_ingest(spec, folder, runs[-1])
    return runs


def test_late_sources_are_processed_when_they_arrive_and_missing_ones_are_named(
    spec: DataSpec, tmp_path: Path
) -> None:
    """Day 2: reels arrive a day late, messaging two days late; later messaging never arrives."""
    assert set(required_daily_sources(spec)) == set(SURFACES)
    day1, day2, day3, day4, day5 = DAYS[:5]
    runs = run_daily(spec, tmp_path, [
        {(name, day1) for name in SURFACES},
        {("feed", day2)},
        {("feed", day3), ("reels", day3), ("reels", day2)},
        {("feed", day4), ("reels", day4), ("messaging", day2)},
        {("feed", day5), ("reels", day5)},
    ])  # fmt: skip
    assert [run.first for run in runs] == [day1, day2, day2, day2, day5]
    assert [run.new_from for run in runs] == [day1, day2, day3, day4, day5]
    assert runs[1].missing_sources == {day2: ("messaging", "reels")}
    assert runs[2].missing_sources == {day2: ("messaging",), day3: ("messaging",)}
    assert runs[3].missing_sources == {day3: ("messaging",), day4: ("messaging",)}
    assert runs[4].missing_source_names == "messaging"


def test_a_day_whose_tables_were_not_finished_is_built_again(
    spec: DataSpec, tmp_path: Path
) -> None:
    day1, day2, day3 = DAYS[:3]
    lake = Lake(str(tmp_path / "lake"), spec)

    def finish(step: str, day: date) -> None:
        with days_in_order(lake, step, (day, day)):
            pass

    for name, day in product(SURFACES, (day1, day2, day3)):
        deliver(tmp_path / "raw", name, day)
    record_ingest(spec, tmp_path, run_of(day1))
    finish("labels", day1)
    finish("history", day1)
    assert plan(spec, tmp_path, day3).first == day3, "tables of the second day are not due yet"
    record_ingest(spec, tmp_path, run_of(day2))
    finish("labels", day2)
    assert plan(spec, tmp_path, day3).first == day2
    finish("history", day2)
    assert plan(spec, tmp_path, day3).first == day3


def test_a_day_without_a_log_is_refused_by_name(spec: DataSpec, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"no log of {FIRST} is complete .*feed/day={{day}}"):
        plan(spec, tmp_path, FIRST)


def test_a_day_that_is_not_over_is_refused_though_it_has_logs(
    spec: DataSpec, tmp_path: Path
) -> None:
    today = spec.day_of(int(time.time()))
    for surface in SURFACES:
        deliver(tmp_path / "raw", surface, today)
    with pytest.raises(UserError, match=f"{today} is not over.*simulator_refresh adds"):
        plan(spec, tmp_path, today)


def test_a_day_that_is_not_completely_written_is_refused(spec: DataSpec, tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    with_marker = with_feed(spec, success_file="_SUCCESS")
    with_pause = with_feed(spec, unchanged_for=600)
    deliver(raw, "feed", FIRST)
    assert has_arrived(spec, str(raw), "feed", FIRST)
    assert not has_arrived(with_marker, str(raw), "feed", FIRST)
    assert not has_arrived(with_pause, str(raw), "feed", FIRST), "it may still be written"
    with pytest.raises(UserError, match=f"no log of {FIRST} is complete"):
        plan(with_pause, tmp_path, FIRST)
    (raw / "feed" / f"day={FIRST}" / "_SUCCESS").touch()
    assert has_arrived(with_marker, str(raw), "feed", FIRST)
    assert not has_arrived(with_marker, str(raw), "feed", DAYS[1])


def test_each_folder_of_a_day_needs_its_marker(spec: DataSpec, tmp_path: Path) -> None:
    hourly = with_feed(spec, path="feed/{day}/*/*.json", success_file="_SUCCESS")
    day = tmp_path / "feed" / f"{FIRST}"
    assert not has_arrived(hourly, str(tmp_path), "feed", FIRST), "there is no folder"
    (day / "_temporary").mkdir(parents=True)
    for hour in ("00", "01"):
        (day / hour).mkdir()
        (day / hour / "part.json").touch()
        assert not has_arrived(hourly, str(tmp_path), "feed", FIRST)
        (day / hour / "_SUCCESS").touch()
        assert has_arrived(hourly, str(tmp_path), "feed", FIRST)


def test_what_ingest_does_not_read_has_not_arrived(spec: DataSpec, tmp_path: Path) -> None:
    """A job that is still writing has a folder `_temporary`, and files that begin with a dot."""
    any_file = with_feed(spec, path="feed/{day}/*")
    day = tmp_path / "feed" / f"{FIRST}"
    (day / "_temporary").mkdir(parents=True)
    (day / "folder").mkdir()
    (day / ".part.json.tmp").touch()
    assert not has_arrived(any_file, str(tmp_path), "feed", FIRST)
    assert day_file_states(any_file, str(tmp_path), FIRST)["feed"] == {}
    (day / "part.json").touch()
    assert has_arrived(any_file, str(tmp_path), "feed", FIRST)


@pytest.mark.parametrize("change", ["another file", "longer", "another of the same size"])
def test_files_that_are_new_or_changed_are_read_again(
    spec: DataSpec, tmp_path: Path, change: str
) -> None:
    day1, day2, day3 = DAYS[:3]
    feed = tmp_path / "raw" / "feed" / f"day={day1}"
    run_daily(spec, tmp_path, [{(name, day) for name in SURFACES} for day in (day1, day2)])
    for name in SURFACES:
        deliver(tmp_path / "raw", name, day3)
    if change == "another file":
        (feed / "part2.json").touch()
    else:
        (feed / "part.json").write_text("{}" if change == "longer" else "")
    planned = plan(spec, tmp_path, day3)
    assert (planned.first, planned.missing_sources) == (day1, {})
    assert plan(spec, tmp_path, day3) == planned, "until they have been read"
    record_ingest(spec, tmp_path, planned)
    assert plan(spec, tmp_path, day3).first == day3


def test_a_file_that_is_still_copied_waits_for_the_next_run(spec: DataSpec, tmp_path: Path) -> None:
    day1, day2 = DAYS[:2]
    run_daily(spec, tmp_path, [{(name, day1) for name in SURFACES}])
    for name in SURFACES:
        deliver(tmp_path / "raw", name, day2)
    (tmp_path / "raw" / "feed" / f"day={day1}" / "part2.json").touch()
    assert plan(with_feed(spec, unchanged_for=600), tmp_path, day2).first == day2
    assert plan(spec, tmp_path, day2).first == day1


def test_a_run_stored_by_another_release_can_be_read() -> None:
    run = run_of(FIRST).model_copy(update={"missing_sources": {FIRST: ("reels",)}})
    stored = run.model_dump(mode="json")
    assert PipelineRun.model_validate(stored | {"a field of another release": 1}) == run
    earlier = {"first": "2026-01-01", "new": "2026-01-01", "last": "2026-01-01",
               "absent": {"2026-01-01": ["reels"]}, "tables": {}}  # fmt: skip
    assert PipelineRun.model_validate(earlier) == run, "as before fields were renamed"


def with_feed(spec: DataSpec, **change: object) -> DataSpec:
    """The spec with another feed source."""
    feed = spec.sources["feed"].model_copy(update=change)
    return spec.model_copy(update={"sources": spec.sources | {"feed": feed}})


LATE_FILES = st.tuples(st.sampled_from(SURFACES[1:]), st.integers(0, 7))


@given(delays=st.dictionaries(LATE_FILES, st.integers(0, 9), max_size=16))
def test_each_day_is_processed_with_all_files_that_arrive_within_the_lateness(
    spec: DataSpec,
    tmp_path_factory: pytest.TempPathFactory,
    delays: dict[tuple[str, int], int],
) -> None:
    """The last run of a day has read all that arrived at most `allowed_lateness` later."""
    folder = tmp_path_factory.mktemp("pipeline")
    arrival = {
        (surface, day): day + delays.get((surface, day), 0)
        for surface in SURFACES
        for day in range(8)
    }
    arrivals = [
        {(surface, DAYS[day]) for (surface, day), arrived in arrival.items() if arrived == today}
        for today in range(8)
    ]
    runs = run_daily(spec, folder, arrivals)
    read: dict[date, set[str]] = {}
    for today, run in enumerate(runs):
        for number, day in enumerate(DAYS[: today + 1]):
            if run.first <= day:
                read[day] = {s for s in SURFACES if arrival[s, number] <= today}
                assert set(run.missing_sources.get(day, ())) == set(SURFACES) - read[day]
    lateness = spec.allowed_lateness // 86400
    for number, day in enumerate(DAYS):
        in_time = {s for s in SURFACES if arrival[s, number] <= min(number + lateness, 7)}
        assert in_time <= read[day]
