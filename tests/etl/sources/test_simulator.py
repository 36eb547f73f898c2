"""Laws of the simulator, checked on what it writes."""

import functools
import gzip
import json
from collections import Counter
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from etl.errors import UserError
from etl.sources.simulator.ads import CANDIDATES
from etl.sources.simulator.choice import draw_in_order
from etl.sources.simulator.config import DAY_MS, HOUR_MS, SimulatorConfig
from etl.sources.simulator.cycles import LEAD, REST, SATISFIED
from etl.sources.simulator.day import live
from etl.sources.simulator.outcomes import ATTRIBUTION_WINDOW_MS
from etl.sources.simulator.simulate import simulate
from etl.sources.simulator.world import World

Record = dict[str, Any]

TINY = SimulatorConfig(
    name="tiny", seed=3, start=date(2026, 1, 30), days=3, users=40, events_per_user_mean=60,
    max_events_per_user=150, posts=100, ads_start=24, ads_per_day=12, advertisers=10, categories=8,
    duplicates=0.01, late=0.02, malformed=0.001,
)  # fmt: skip
CLEAN = {"duplicates": 0.0, "late": 0.0, "malformed": 0.0}
DIRTY = TINY.model_copy(
    update={
        "days": 6, "users": 300, "events_per_user_mean": 200, "max_events_per_user": 700,
        "duplicates": 0.03, "late": 0.08, "malformed": 0.02,
    }
)  # fmt: skip


def lines(run: Path, kind: str) -> list[bytes]:
    files = sorted((run / kind).rglob("*.json.gz"))
    return [line for file in files for line in gzip.decompress(file.read_bytes()).splitlines()]


def is_good(record: Record) -> bool:
    return (
        {"user_id", "item_id", "event_id"} <= record.keys()
        and record["surface"] in ("feed", "reels", "messaging")
        and isinstance(record["event_time"], int)
        and 1.7e12 < record["event_time"] < 1.9e12
        and isinstance(record.get("position", 0), int)
        and record.get("dwell_ms", 0) >= 0
    )


@functools.cache
def good_lines(run: Path) -> list[Record]:
    """All good lines, copies included, in the order of landing."""
    records = []
    for line in lines(run, "events"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if is_good(record):
            records.append(record)
    return sorted(records, key=lambda record: record["ingest_time"])


@functools.cache
def first_copies(run: Path) -> list[Record]:
    copies: dict[str, Record] = {}
    for record in good_lines(run):
        copies.setdefault(record["event_id"], record)
    return list(copies.values())


@functools.cache
def truth_of(run: Path) -> dict[str, Record]:
    return {row["impression_id"]: row for row in pq.read_table(run / "truth").to_pylist()}


def of_type(records: list[Record], kind: str) -> list[Record]:
    return [record for record in records if record["type"] == kind]


def contents(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file()}


def assert_calibrated(probability: list[float], outcome: list[bool]) -> None:
    p = np.array(probability)
    error = np.sum(outcome) - p.sum()
    assert abs(error) < 4 * np.sqrt(np.sum(p * (1 - p)))


@pytest.fixture(scope="module")
def dirty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("simulator") / "dirty"
    simulate(DIRTY, run)
    return run


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("simulator") / "clean"
    simulate(DIRTY.model_copy(update=CLEAN), run)
    return run


@pytest.mark.parametrize("name", ["demo", "bench"])
def test_shipped_configs_are_valid(name: str) -> None:
    file = Path(__file__).parents[3] / "conf" / "simulator" / f"{name}.yaml"
    assert SimulatorConfig(**yaml.safe_load(file.read_text())).name == name


def test_a_seed_fixes_every_byte(tmp_path: Path) -> None:
    for name, seed in (("one", 3), ("same", 3), ("other", 4)):
        simulate(TINY.model_copy(update={"seed": seed}), tmp_path / name)
    assert contents(tmp_path / "one") == contents(tmp_path / "same")
    assert truth_of(tmp_path / "one") != truth_of(tmp_path / "other")


def test_every_logged_impression_has_its_truth_and_no_other(dirty: Path) -> None:
    shown = [record["impression_id"] for record in of_type(first_copies(dirty), "ad_impression")]
    assert Counter(shown) == Counter(pq.read_table(dirty / "truth")["impression_id"].to_pylist())


def test_truth_lies_under_the_day_of_its_event(dirty: Path) -> None:
    shown = of_type(first_copies(dirty), "ad_impression")
    day_of = {r["impression_id"]: datetime.fromtimestamp(r["event_time"] / 1e3, UTC) for r in shown}
    for file in (dirty / "truth").iterdir():
        for impression in pq.read_table(file)["impression_id"].to_pylist():
            assert file.stem == f"day={day_of[impression]:%Y-%m-%d}"


@pytest.mark.parametrize("surface", ["feed", "reels", "messaging"])
@pytest.mark.parametrize(
    ("kind", "probability"), [("ad_click", "p_click"), ("ad_long_view", "p_long_view")]
)
def test_probabilities_are_those_of_the_outcomes(
    dirty: Path, surface: str, kind: str, probability: str
) -> None:
    events, truth = first_copies(dirty), truth_of(dirty)
    happened = {record["impression_id"] for record in of_type(events, kind)}
    shown = [
        r["impression_id"] for r in of_type(events, "ad_impression") if r["surface"] == surface
    ]
    assert_calibrated([truth[i][probability] for i in shown], [i in happened for i in shown])


def test_probability_of_conversion_is_that_within_the_attribution_window(clean: Path) -> None:
    events, truth = first_copies(clean), truth_of(clean)
    clicks = sorted(of_type(events, "ad_click"), key=lambda r: r["event_time"])
    converted = set()
    for conversion in of_type(events, "conversion"):
        key, now = (conversion["user_id"], conversion["item_id"]), conversion["event_time"]
        mine = [r for r in clicks if (r["user_id"], r["item_id"]) == key and r["event_time"] < now]
        if now - mine[-1]["event_time"] <= ATTRIBUTION_WINDOW_MS:
            converted.add(mine[-1]["impression_id"])
    closed_ms = DIRTY.end_ms - ATTRIBUTION_WINDOW_MS - 6 * HOUR_MS
    shown = of_type(events, "ad_impression")
    ripe = [r["impression_id"] for r in shown if r["event_time"] < closed_ms]
    assert_calibrated([truth[i]["p_conversion"] for i in ripe], [i in converted for i in ripe])


def test_inverse_propensities_count_the_candidates(clean: Path) -> None:
    shown = of_type(first_copies(clean), "ad_impression")
    assert all(0 < record["propensity"] <= 1 for record in shown)
    count = np.array([1 / record["propensity"] + record["position"] for record in shown])
    assert abs(count.mean() - CANDIDATES) < 4 * count.std() / np.sqrt(count.size)


def test_propensity_is_how_often_a_candidate_is_drawn() -> None:
    logits = np.tile([0.0, 1.0, -1.0, 0.5], (40_000, 1))
    order, propensity = draw_in_order(logits, np.random.default_rng(0))
    assert (np.sort(order) == np.arange(4)).all()
    softmax = np.exp(logits[0]) / np.exp(logits[0]).sum()
    assert np.bincount(order[:, 0]) / len(order) == pytest.approx(softmax, abs=0.01)
    assert propensity[:, 0] == pytest.approx(softmax[order[:, 0]])
    after_1 = order[order[:, 0] == 1, 1]
    rest = np.array([softmax[0], 0, softmax[2], softmax[3]]) / (1 - softmax[1])
    assert np.bincount(after_1, minlength=4) / after_1.size == pytest.approx(rest, abs=0.02)


def test_the_ads_of_a_request_are_shown_together_and_differ(clean: Path) -> None:
    requests: dict[str, list[Record]] = {}
    for record in of_type(first_copies(clean), "ad_impression"):
        requests.setdefault(record["request_id"], []).append(record)
    for slots in requests.values():
        assert len({(r["user_id"], r["surface"], r["event_time"]) for r in slots}) == 1
        assert len({r["item_id"] for r in slots}) == len(slots)


def test_a_record_lies_under_the_day_on_which_it_landed(dirty: Path) -> None:
    for record in good_lines(dirty):
        assert DIRTY.start_ms <= record["event_time"] < record["ingest_time"] < DIRTY.end_ms
    for folder in (dirty / "events").iterdir():
        for line in gzip.decompress((folder / "part-00000.json.gz").read_bytes()).splitlines():
            if b"ingest_time" in line and line.endswith(b"}"):
                landed = datetime.fromtimestamp(json.loads(line)["ingest_time"] / 1e3, UTC)
                assert folder.name == f"day={landed:%Y-%m-%d}"


def test_disorder_comes_at_its_rates(dirty: Path) -> None:
    every, events = good_lines(dirty), first_copies(dirty)
    assert (len(every) - len(events)) / len(events) == pytest.approx(DIRTY.duplicates, rel=0.15)
    bad = len(lines(dirty, "events")) - len(every)
    assert bad / len(every) == pytest.approx(DIRTY.malformed, rel=0.15)
    free = [  # records that had the time to be late
        r for r in events
        if r["event_time"] < DIRTY.end_ms - 2 * DAY_MS and r["type"] != "conversion"
    ]  # fmt: skip
    delays = np.array([r["ingest_time"] - r["event_time"] for r in free])
    assert np.mean(delays > HOUR_MS) == pytest.approx(DIRTY.late, rel=0.15)
    assert delays.max() <= 2 * DAY_MS


def test_a_copy_differs_only_in_landing_later(dirty: Path) -> None:
    first = {record["event_id"]: record for record in first_copies(dirty)}
    for record in good_lines(dirty):
        original = first[record["event_id"]]
        assert record == original | {"ingest_time": record["ingest_time"]}
    landings = Counter((r["event_id"], r["ingest_time"]) for r in good_lines(dirty))
    assert max(landings.values()) == 1


def test_no_rate_no_disorder(clean: Path) -> None:
    records = [json.loads(line) for line in lines(clean, "events")]
    assert all(is_good(record) for record in records)
    assert len({record["event_id"] for record in records}) == len(records)
    measured = of_type(records, "conversion")
    rest = [r for r in records if r not in measured]
    assert max(r["ingest_time"] - r["event_time"] for r in rest) < HOUR_MS


def test_disorder_changes_neither_the_truth_nor_what_happened(clean: Path, dirty: Path) -> None:
    assert truth_of(clean) == truth_of(dirty)

    def happened(run: Path) -> dict[str, Record]:
        return {r["event_id"]: r | {"ingest_time": 0} for r in first_copies(run)}

    assert happened(clean) == happened(dirty)


def test_nothing_happens_to_what_does_not_exist_yet(dirty: Path) -> None:
    users = [json.loads(line) for line in lines(dirty, "users")]
    items = [json.loads(line) for line in lines(dirty, "items")]
    since = {r["user_id"]: r["changed_time"] for r in reversed(users)}
    since |= {r["item_id"]: r["created_time"] for r in items}
    assert len(items) == DIRTY.posts + DIRTY.ads
    assert len(since) == len(items) + DIRTY.users
    for record in first_copies(dirty):
        assert record["event_time"] >= max(since[record["user_id"]], since[record["item_id"]])


def test_attributes_change_for_a_few(dirty: Path) -> None:
    versions = Counter(json.loads(line)["user_id"] for line in lines(dirty, "users"))
    assert len(versions) == DIRTY.users
    assert 0 < versions.total() - DIRTY.users < 0.1 * DIRTY.users * DIRTY.days


def test_a_conversion_lands_after_its_click_and_names_no_impression(clean: Path) -> None:
    events = first_copies(clean)
    clicks = of_type(events, "ad_click")
    conversions = of_type(events, "conversion")
    assert conversions
    for conversion in conversions:
        key = [conversion[name] for name in ("user_id", "item_id", "surface")]
        mine = [r for r in clicks if [r["user_id"], r["item_id"], r["surface"]] == key]
        assert min(r["event_time"] for r in mine) < conversion["event_time"]
        assert min(r["ingest_time"] for r in mine) < conversion["ingest_time"]
        assert "impression_id" not in conversion


def test_users_do_as_much_as_asked_for_and_never_more_than_allowed(clean: Path) -> None:
    counts = Counter(record["user_id"] for record in first_copies(clean))
    assert max(counts.values()) <= DIRTY.max_events_per_user
    assert counts.total() / DIRTY.users == pytest.approx(DIRTY.events_per_user_mean, rel=0.15)


def test_outcomes_belong_to_impressions_in_the_log_of_the_same_user(clean: Path) -> None:
    events = first_copies(clean)
    owner = {r["impression_id"]: r["user_id"] for r in of_type(events, "ad_impression")}
    for kind in ("ad_view", "ad_long_view", "ad_click"):
        assert all(owner[r["impression_id"]] == r["user_id"] for r in of_type(events, kind))


def test_need_rises_before_a_purchase_and_falls_after() -> None:
    world = World.draw(DIRTY)
    user, category, time_ms = world.cycles.purchases(DIRTY.start_ms, DIRTY.end_ms)
    period_ms = world.taste.period_ms[category]

    def need(periods: float) -> np.ndarray:
        moment = time_ms + (periods * period_ms).astype(np.int64)
        return world.cycles.need(world.taste, user, category, moment)

    assert (need(-0.9 * LEAD) == 1).all()
    assert (need(0.9 * SATISFIED) == 1).all()
    assert (need(2 * SATISFIED) == -REST).all()
    assert (need(0.6) == 0).all()
    other = np.array([np.setdiff1d(np.arange(8), c)[0] for c in world.cycles.category])[user]
    assert (world.cycles.need(world.taste, user, other, time_ms) == 0).all()


def test_people_buy_at_the_pace_of_the_category(clean: Path) -> None:
    period_ms = World.draw(DIRTY).taste.period_ms
    last: dict[tuple[str, int], int] = {}
    for record in sorted(first_copies(clean), key=lambda r: r["event_time"]):
        if record["type"] == "post_purchase":
            category = int(record["item_id"][1:]) % DIRTY.categories
            key = (record["user_id"], category)
            if key in last:
                interval = (record["event_time"] - last[key]) / period_ms[category]
                assert interval == pytest.approx(1, abs=0.15)
            last[key] = record["event_time"]


def test_a_foreign_folder_is_refused_and_the_same_run_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    simulate(TINY, run)
    before = contents(run)
    simulate(TINY, run)
    assert "already holds" in capsys.readouterr().out
    with pytest.raises(UserError, match=f"{run}.*another folder"):
        simulate(TINY.model_copy(update={"seed": 4}), run)
    assert contents(run) == before
    (tmp_path / "foreign").mkdir()
    with pytest.raises(UserError, match="foreign"):
        simulate(TINY, tmp_path / "foreign")


def test_an_interrupted_run_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(world: World, day: int, room: np.ndarray) -> Any:
        if day == 1:
            raise KeyboardInterrupt
        return live(world, day, room)

    monkeypatch.setattr("etl.sources.simulator.simulate.live", interrupted)
    with pytest.raises(KeyboardInterrupt):
        simulate(TINY, tmp_path / "run")
    assert not list(tmp_path.iterdir())
