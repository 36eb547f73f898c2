"""Which logs a day waits for: two surfaces late, one never."""

from collections.abc import Iterable
from datetime import date, timedelta
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dags.arrival import begin
from dags.runs import Run
from etl.arrival import daily_sources, files_of_day, has_arrived, record_files
from etl.errors import UserError
from etl.spec import DataSpec, load_spec
from etl.spec.units import each_day
from tests.conftest import FIRST, short_spec

SURFACES = ("feed", "reels", "messaging")
DAYS = [FIRST + timedelta(days=n) for n in range(8)]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    """A log a surface; attributes without days."""
    raw = yaml.safe_load(short_spec())
    log = raw["sources"].pop("events")
    for source in raw["sources"].values():
        source["path"] = source["path"].replace("day={day}", "all")
    raw["sources"] |= {name: log | {"path": f"{name}/day={{day}}/*.json"} for name in SURFACES}
    path = tmp_path_factory.mktemp("spec") / "three.yaml"
    path.write_text(yaml.safe_dump(raw, sort_keys=False))
    return load_spec(path)


def come(raw: Path, surface: str, day: date) -> None:
    file = raw / surface / f"day={day}" / "part.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()


def ingested(spec: DataSpec, folder: Path, made: Run) -> None:
    """Record what an ingest of a run would have read."""
    days = each_day(made.first, made.last)
    read = {day: files_of_day(spec, str(folder / "raw"), day) for day in days}
    record_files(str(folder / "lake"), read)


def run(day: date) -> Run:
    return Run(first=day, new=day, last=day)


def days_of(spec: DataSpec, folder: Path, arrivals: Iterable[set[tuple[str, date]]]) -> list[Run]:
    """What each day's run works on, given what has come when it begins."""
    told: list[Run] = []
    for day, new in zip(DAYS, arrivals, strict=False):
        for surface, of in new:
            come(folder / "raw", surface, of)
        told.append(begin(spec, str(folder / "raw"), str(folder / "lake"), run(day)))
        ingested(spec, folder, told[-1])
    return told


def test_two_late_one_never(spec: DataSpec, tmp_path: Path) -> None:
    """The second day's reels come a day late, its messages two days; messaging never after."""
    assert set(daily_sources(spec)) == set(SURFACES)
    one, two, three, four, five = DAYS[:5]
    told = days_of(spec, tmp_path, [
        {(name, one) for name in SURFACES},
        {("feed", two)},
        {("feed", three), ("reels", three), ("reels", two)},
        {("feed", four), ("reels", four), ("messaging", two)},
        {("feed", five), ("reels", five)},
    ])  # fmt: skip
    assert [r.first for r in told] == [one, two, two, two, five]
    assert [r.new for r in told] == [one, two, three, four, five]
    assert told[1].absent == {two: ("messaging", "reels")}
    assert told[2].absent == {two: ("messaging",), three: ("messaging",)}
    assert told[3].absent == {three: ("messaging",), four: ("messaging",)}
    assert told[4].sources_absent == "messaging"


def test_a_day_without_a_log_is_refused_by_name(spec: DataSpec, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"no log of {FIRST} is complete .*feed/day={{day}}"):
        begin(spec, str(tmp_path), str(tmp_path / "lake"), run(FIRST))


def test_half_a_day_is_not_a_day(spec: DataSpec, tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    marked, waiting = (with_source(spec, **change) for change in (
        {"complete": "_SUCCESS"}, {"unchanged_for": 600}
    ))  # fmt: skip
    come(raw, "feed", FIRST)
    assert has_arrived(spec, str(raw), "feed", FIRST)
    assert not has_arrived(marked, str(raw), "feed", FIRST)
    assert not has_arrived(waiting, str(raw), "feed", FIRST), "it may still be written"
    with pytest.raises(UserError, match=f"no log of {FIRST} is complete"):
        begin(waiting, str(raw), str(tmp_path / "lake"), run(FIRST))
    (raw / "feed" / f"day={FIRST}" / "_SUCCESS").touch()
    assert has_arrived(marked, str(raw), "feed", FIRST)
    assert not has_arrived(marked, str(raw), "feed", DAYS[1])


@pytest.mark.parametrize("change", ["more", "longer", "another of the same size"])
def test_files_that_are_new_or_changed_are_read_again(
    spec: DataSpec, tmp_path: Path, change: str
) -> None:
    one, two, three = DAYS[:3]
    feed = tmp_path / "raw" / "feed" / f"day={one}"
    days_of(spec, tmp_path, [{(name, day) for name in SURFACES} for day in (one, two)])
    for name in SURFACES:
        come(tmp_path / "raw", name, three)
    if change == "more":
        (feed / "part2.json").touch()
    else:
        (feed / "part.json").write_text("{}" if change == "longer" else "")
    begun = begin(spec, str(tmp_path / "raw"), str(tmp_path / "lake"), run(three))
    assert (begun.first, begun.absent) == (one, {})
    again = begin(spec, str(tmp_path / "raw"), str(tmp_path / "lake"), run(three))
    assert again == begun, "until they have been read"
    ingested(spec, tmp_path, begun)
    assert begin(spec, str(tmp_path / "raw"), str(tmp_path / "lake"), run(three)).first == three


def test_a_file_that_is_still_copied_waits_for_the_next_run(spec: DataSpec, tmp_path: Path) -> None:
    one, two = DAYS[:2]
    days_of(spec, tmp_path, [{(name, one) for name in SURFACES}])
    for name in SURFACES:
        come(tmp_path / "raw", name, two)
    (tmp_path / "raw" / "feed" / f"day={one}" / "part2.json").touch()
    waiting = with_source(spec, unchanged_for=600)
    place = str(tmp_path / "raw"), str(tmp_path / "lake")
    assert begin(waiting, *place, run(two)).first == two
    assert begin(spec, *place, run(two)).first == one


def test_a_run_of_another_release_can_be_read() -> None:
    stored = run(FIRST).model_dump(mode="json") | {"a field of another release": 1}
    assert Run.model_validate(stored) == run(FIRST)


def with_source(spec: DataSpec, **change: object) -> DataSpec:
    """The spec, its feed changed."""
    feed = spec.sources["feed"].model_copy(update=change)
    return spec.model_copy(update={"sources": spec.sources | {"feed": feed}})


LATE = st.tuples(st.sampled_from(SURFACES[1:]), st.integers(0, 7))


@given(arrived_after=st.dictionaries(LATE, st.integers(0, 9), max_size=16))
def test_whatever_comes_in_time_is_taken_in_once(
    spec: DataSpec, tmp_path_factory: pytest.TempPathFactory, arrived_after: dict
) -> None:
    """In the end each day was made with all that came at most as late as the spec waits."""
    raw = tmp_path_factory.mktemp("line")
    when = {(name, n): n for name in SURFACES for n in range(8)} | {
        (name, n): n + wait for (name, n), wait in arrived_after.items()
    }
    arrivals = [{(s, DAYS[n]) for (s, n), at in when.items() if at == today} for today in range(8)]
    told = days_of(spec, raw, arrivals)
    wait = spec.lateness // 86400
    made: dict[date, set[str]] = {}
    for today, of in enumerate(told):
        for n, day in enumerate(DAYS[: today + 1]):
            if of.first <= day:
                made[day] = {s for s in SURFACES if when[s, n] <= today}
                assert set(of.absent.get(day, ())) == set(SURFACES) - made[day]
    for n, day in enumerate(DAYS):
        assert {s for s in SURFACES if when[s, n] <= min(n + wait, 7)} <= made[day]
