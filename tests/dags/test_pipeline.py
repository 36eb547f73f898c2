"""The declared steps: their order, their command lines, and when they run again."""

import shutil
from collections.abc import Iterable
from datetime import date, timedelta
from pathlib import Path

import pytest

from dags.commands import RunArgs
from dags.pipeline import latest_mature_split, pipeline_steps
from dags.refresh import RefreshPlan, refresh_steps
from dags.runner import input_fingerprint, is_up_to_date, pending_steps, raw_file_states
from dags.steps import RAW_SOURCE_KINDS, PipelinePaths, Step, earlier_steps
from etl.cli.runner import DayArgs
from etl.errors import UserError
from etl.ingest.arrival import FileStates
from etl.spec import DataSpec, load_spec
from etl.spec.units import DaySplit
from etl.tables import step_state
from tests.cli import parse_command
from tests.conftest import ROOT
from training.commands import GemArgs, SplitArgs

SPECS = sorted((ROOT / "conf/specs").glob("*.yaml"))
RAW = "raw"
TABLES_BY_SOURCE = {"quarantine"}  # several steps write it, each the part of its source
FIRST, LAST = date(2026, 1, 1), date(2026, 1, 4)


@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.stem)
def test_every_step_reads_what_an_earlier_step_writes(path: Path) -> None:
    spec = load_spec(path)
    split = latest_mature_split(spec, FIRST, date(2026, 1, 11))
    written = {RAW}
    steps = pipeline_steps(spec, PipelinePaths(path, "logs", "lake"), split)
    for step in steps:
        assert set(step.reads) <= written, step.name
        assert not set(step.writes) & written - TABLES_BY_SOURCE, step.name
        written |= set(step.writes)
    assert len({step.name for step in steps}) == len(steps)
    assert {f"rankers/{surface}/current.json" for surface in spec.ad_surfaces} <= written


@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.stem)
def test_every_command_line_parses_and_names_the_days_of_the_split(path: Path) -> None:
    spec = load_spec(path)
    split = latest_mature_split(spec, FIRST, date(2026, 1, 11))
    paths = PipelinePaths(path, "logs", "lake")
    for step in pipeline_steps(spec, paths, split, ("--scale", "tiny")):
        args = parse_command(step.command)
        if isinstance(args, SplitArgs):
            assert args.split == split, step.name
        if isinstance(args, DayArgs):
            first, last = args.day_range
            assert split.train_first <= first <= last <= split.data_until, step.name
        if step.surface:
            assert getattr(args, "surface", None) == step.surface


def test_a_run_passes_the_flags_of_gem_on() -> None:
    path = ROOT / "conf/specs/simulator.yaml"
    spec = load_spec(path)
    split = latest_mature_split(spec, FIRST, date(2026, 1, 11))
    flags = {"spec": path, "raw": "logs", "lake": "lake", "days": "2026-01-01:2026-01-11"}
    gem = "--teacher.seeds 3 --teacher.blend lightgbm --scale base"
    args = RunArgs.model_validate(flags | {"gem": gem})
    steps = pipeline_steps(spec, args.paths, split, args.gem_flags)
    (train,) = (step for step in steps if step.name == "gem")
    parsed = parse_command(train.command)
    assert isinstance(parsed, GemArgs) and parsed.scale == "base"
    assert (parsed.teacher.seeds, parsed.teacher.blend) == (3, "lightgbm")
    with pytest.raises(UserError, match="No closing quotation"):
        _ = RunArgs.model_validate(flags | {"gem": "--scale 'base"}).gem_flags


def test_a_run_trains_gem_on_all_days_and_ends_a_joint_training_before_the_test_days() -> None:
    """A joint training of all days would have learned the test days before it is evaluated."""
    path = ROOT / "conf/specs/simulator.yaml"
    spec = load_spec(path)
    split = latest_mature_split(spec, FIRST, date(2026, 1, 11))
    steps = pipeline_steps(spec, PipelinePaths(path, "logs", "lake"), split)
    (gem,) = (args for args in map(parse_command, (step.command for step in steps))
              if isinstance(args, GemArgs))  # fmt: skip
    assert gem.day_range == (split.train_first, split.data_until)
    assert gem.joint_until == split.train_last < split.test_first


def test_labels_are_final_on_the_test_day_and_days_are_in_order() -> None:
    spec = load_spec(ROOT / "conf/specs/simulator.yaml")
    split = latest_mature_split(spec, FIRST, date(2026, 1, 11))
    labels_final = spec.day_end(split.test_last) + max(
        objective.label_maturity_seconds for objective in spec.objectives.values()
    )
    assert labels_final <= spec.day_end(split.data_until)
    assert split.calibration is not None
    assert split.train_last < split.calibration < split.test_first
    with pytest.raises(UserError, match="too short"):
        latest_mature_split(spec, FIRST, date(2026, 1, 5))


def test_impressions_of_the_test_day_are_visible() -> None:
    dump = load_spec(ROOT / "conf/specs/kuairand.yaml").model_dump()
    log, last = dump["sources"]["log"], date(2026, 1, 11)
    log["outcomes"] = [outcome | {"delay": None} for outcome in log["outcomes"]]
    for delay, test_last in (("1h", last), ("3d", date(2026, 1, 8))):
        log["delay"] = delay
        assert (
            latest_mature_split(DataSpec.model_validate(dump), FIRST, last).test_last == test_last
        )


def test_the_report_waits_for_all_tables_that_it_shows() -> None:
    path = ROOT / "conf/specs/simulator.yaml"
    spec = load_spec(path)
    split = latest_mature_split(spec, FIRST, date(2026, 1, 11))
    steps = pipeline_steps(spec, PipelinePaths(path, "logs", "lake"), split)
    shown = {"feature_statistics", "audience_quality", "response_curves", "forecast"}
    assert shown <= {*earlier_steps(steps[-1], steps)} and steps[-1].name == "report"


def finish(spec: DataSpec, paths: PipelinePaths, steps: Iterable[Step]) -> None:
    """Record steps as finished, with empty outputs."""
    all_steps = list(steps)
    for step in all_steps:
        fingerprint = input_fingerprint(spec, paths, all_steps, step)
        step_state.write_step_state(paths.lake, step.recorded_name, fingerprint, 1.0)
        for name in step.writes:
            Path(paths.lake, name).mkdir(parents=True, exist_ok=True)


def short_split(spec: DataSpec) -> DaySplit:
    return latest_mature_split(spec, FIRST, LAST)


def test_a_step_is_up_to_date_until_its_inputs_change(
    tmp_path: Path, raw: Path, spec_path: Path
) -> None:
    spec = load_spec(spec_path)
    paths = PipelinePaths(spec_path, str(raw), str(tmp_path))
    steps = pipeline_steps(spec, paths, short_split(spec))
    step_named = {step.name: step for step in steps}

    def up_to_date(name: str) -> bool:
        return is_up_to_date(spec, paths, steps, step_named[name])

    assert not any(up_to_date(step.name) for step in steps)
    finish(spec, paths, steps)
    assert all(up_to_date(step.name) for step in steps)
    fingerprint = input_fingerprint(spec, paths, steps, step_named["ingest"])
    step_state.write_step_state(paths.lake, "ingest", fingerprint, 1.0)
    assert up_to_date("ingest") and up_to_date("attributes")
    for reader in ("labels", "items", "history"):
        assert not up_to_date(reader), "ingest ran again, so its readers are stale"


@pytest.fixture
def finished_run(
    tmp_path: Path, raw: Path, spec_path: Path
) -> tuple[DataSpec, PipelinePaths, list[Step]]:
    """A run of which all steps are recorded as finished."""
    spec = load_spec(spec_path)
    paths = PipelinePaths(spec_path, str(raw), str(tmp_path))
    steps = pipeline_steps(spec, paths, short_split(spec))
    finish(spec, paths, steps)
    return spec, paths, steps


def test_steps_that_read_a_changed_step_run_again(
    tmp_path: Path, finished_run: tuple[DataSpec, PipelinePaths, list[Step]]
) -> None:
    spec, paths, steps = finished_run
    assert pending_steps(spec, paths, steps) == []
    with_larger_gem = pipeline_steps(spec, paths, short_split(spec), ("--scale", "base"))
    names = [step.name for step in pending_steps(spec, paths, with_larger_gem)]
    (tmp_path / "report.html").rmdir()
    assert [step.name for step in pending_steps(spec, paths, steps)] == ["report"]
    assert names[:3] == ["gem", "teacher_predictions", "evaluate"] and names[-1] == "report"
    assert "baseline" not in names and "examples" not in names


def test_a_run_goes_on_after_a_refresh_of_the_next_day(
    finished_run: tuple[DataSpec, PipelinePaths, list[Step]],
) -> None:
    spec, paths, steps = finished_run
    end = f"{LAST + timedelta(days=1)}T12:00+00:00"
    days = f"{LAST}:{LAST + timedelta(days=1)}"
    plan = RefreshPlan(days=days, data_until=end, missing_sources="", surfaces=())
    refresh = refresh_steps(spec, paths, plan)
    assert pending_steps(spec, paths, refresh) == refresh
    finish(spec, paths, refresh)
    assert pending_steps(spec, paths, refresh) == pending_steps(spec, paths, steps) == []


def test_only_raw_files_of_the_days_of_a_run_count(
    tmp_path: Path, raw: Path, spec_path: Path
) -> None:
    spec = load_spec(spec_path)
    logs = tmp_path / "logs"
    shutil.copytree(raw, logs)
    days = (FIRST, date(2026, 1, 3))

    def files() -> FileStates:
        return raw_file_states(spec, str(logs), ("event_log",), days)

    before = files()
    assert before["events"]
    for path in logs.glob("events/day=2026-01-04/*"):
        path.unlink()
    assert files() == before
    next(logs.glob("events/day=2026-01-03/*")).write_bytes(b"")
    assert files() != before


def test_a_file_that_is_delivered_again_repeats_only_the_steps_that_read_it(
    tmp_path: Path, raw: Path, spec_path: Path
) -> None:
    spec = load_spec(spec_path)
    shutil.copytree(raw, tmp_path / "logs")
    paths = PipelinePaths(spec_path, str(tmp_path / "logs"), str(tmp_path / "lake"))
    steps = pipeline_steps(spec, paths, short_split(spec))
    assert {step.name for step in steps if RAW in step.reads} == set(RAW_SOURCE_KINDS)
    kinds = [kind for names in RAW_SOURCE_KINDS.values() for kind in names]
    assert {source.kind for source in spec.sources.values()} <= set(kinds)
    finish(spec, paths, steps)
    next((tmp_path / "logs").glob("audits/*")).touch()
    names = [step.name for step in pending_steps(spec, paths, steps)]
    assert names == ["audience", "audience_quality", "forecast", "report"]
