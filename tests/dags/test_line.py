import shutil
from datetime import date
from pathlib import Path

import pytest

from dags.inputs import finished, inputs_of, raw_files
from dags.line import Place, line, newest_mature
from dags.local import unfinished
from etl.errors import UserError
from etl.spec import load_spec
from etl.tables import records
from tests.conftest import ROOT

SPECS = sorted((ROOT / "conf/specs").glob("*.yaml"))
RAW = "raw"
BY_LOG = {"quarantine"}  # every log has a part of its own there, so several steps write it


@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.stem)
def test_every_step_reads_what_an_earlier_one_wrote(path: Path) -> None:
    spec = load_spec(path)
    days = newest_mature(spec, date(2026, 1, 1), date(2026, 1, 11))
    written = {RAW}
    steps = line(spec, Place(path, "logs", "lake"), days)
    for step in steps:
        assert set(step.reads) <= written, step.name
        assert not set(step.writes) & written - BY_LOG, step.name
        written |= set(step.writes)
    assert len({step.name for step in steps}) == len(steps)
    assert {f"rankers/{surface}/current.json" for surface in spec.ad_surfaces} <= written


def test_labels_are_final_on_the_test_day_and_days_are_in_order() -> None:
    spec = load_spec(ROOT / "conf/specs/simulator.yaml")
    days = newest_mature(spec, date(2026, 1, 1), date(2026, 1, 11))
    latest = spec.day_end(days.test_last) + max(o.ripens_after for o in spec.objectives.values())
    assert latest <= spec.day_end(days.last)
    assert days.train_last < days.calibration < days.test_first
    with pytest.raises(UserError, match="too short"):
        newest_mature(spec, date(2026, 1, 1), date(2026, 1, 5))


def test_a_step_is_finished_until_its_inputs_change(
    tmp_path: Path, raw: Path, spec_path: Path
) -> None:
    spec = load_spec(spec_path)
    place = Place(spec_path, str(raw), str(tmp_path))
    days = newest_mature(spec, date(2026, 1, 1), date(2026, 1, 4))
    steps = line(spec, place, days)
    done = lambda name: finished(spec, place, steps, named[name])  # noqa: E731
    named = {step.name: step for step in steps}
    for step in steps:
        assert not done(step.name)
        records.write(place.lake, step.name, inputs_of(spec, place, steps, step), 1.0)
        for name in step.writes:
            (tmp_path / name).mkdir(parents=True, exist_ok=True)
    assert all(done(step.name) for step in steps)
    ingest = inputs_of(spec, place, steps, named["ingest"])
    records.write(place.lake, "ingest", ingest, 1.0)  # it ran again: all that reads it is stale
    assert done("ingest") and done("attributes")
    assert not done("labels") and not done("items") and not done("history")


def test_what_reads_a_renewed_step_runs_again(tmp_path: Path, raw: Path, spec_path: Path) -> None:
    spec = load_spec(spec_path)
    place = Place(spec_path, str(raw), str(tmp_path))
    days = newest_mature(spec, date(2026, 1, 1), date(2026, 1, 4))
    steps = line(spec, place, days)
    for step in steps:
        records.write(place.lake, step.name, inputs_of(spec, place, steps, step), 1.0)
        for name in step.writes:
            (tmp_path / name).mkdir(parents=True, exist_ok=True)
    assert unfinished(spec, place, steps) == []
    larger = line(spec, place, days, ("--scale", "base"))
    names = [step.name for step in unfinished(spec, place, larger)]
    (tmp_path / "report.html").rmdir()
    assert [step.name for step in unfinished(spec, place, steps)] == ["report"]
    assert names[:3] == ["gem", "knowledge", "evaluate"] and names[-1] == "report"
    assert "baseline" not in names and "examples" not in names


def test_only_files_of_the_days_of_a_run_count(tmp_path: Path, raw: Path, spec_path: Path) -> None:
    spec = load_spec(spec_path)
    logs = tmp_path / "logs"
    shutil.copytree(raw, logs)
    before = raw_files(spec, str(logs), (date(2026, 1, 1), date(2026, 1, 3)))
    assert before
    for path in logs.glob("events/day=2026-01-04/*"):
        path.unlink()
    assert raw_files(spec, str(logs), (date(2026, 1, 1), date(2026, 1, 3))) == before
    next(logs.glob("events/day=2026-01-03/*")).write_bytes(b"")
    assert raw_files(spec, str(logs), (date(2026, 1, 1), date(2026, 1, 3))) != before
