"""Invariants of the simulator, checked on the logs and the truth that it writes."""

import gzip
import hashlib
import json
from collections import Counter
from datetime import UTC, date, datetime
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from etl.array_types import Floats, Int64
from etl.errors import UserError
from etl.simulator.ads import ATTRIBUTION_WINDOW_MS, CANDIDATES, GroundTruth
from etl.simulator.arrays import Events, sample_without_replacement
from etl.simulator.config import DAY_MS, HOUR_MS, SimulatorConfig
from etl.simulator.simulate import simulate, simulate_day
from etl.simulator.world import NEED_LEAD_PERIODS, NEED_TAIL_PERIODS, SATIATION_PENALTY, World
from tests.etl.simulator.simulated_logs import (
    Record,
    is_valid,
    of_type,
    read_lines,
    truth_of,
    unique_events,
    valid_records,
)

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


def contents(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file()}


def assert_calibrated(probability: list[float], outcome: list[bool]) -> None:
    """The number of outcomes is within four standard deviations of the expected number."""
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


def test_the_logs_of_the_benchmarks_are_those_that_published_figures_were_measured_on(
    tmp_path: Path,
) -> None:
    """Byte for byte as at commit 0e990e9, with fewer users."""
    file = Path(__file__).parents[3] / "conf" / "simulator" / "bench.yaml"
    simulate(SimulatorConfig(**yaml.safe_load(file.read_text()) | {"users": 60}), tmp_path / "run")
    digest = hashlib.sha256()
    for log in sorted((tmp_path / "run").rglob("*.json.gz")):
        digest.update(str(log.relative_to(tmp_path / "run")).encode())
        digest.update(gzip.decompress(log.read_bytes()))
    expected = "7a842ad587c47bc6e5abf3d627c7ff9559fe3320aa42733bba66668c36757b2f"
    assert digest.hexdigest() == expected


def test_exactly_the_logged_impressions_have_a_truth(dirty: Path) -> None:
    shown = [record["impression_id"] for record in of_type(unique_events(dirty), "ad_impression")]
    assert Counter(shown) == Counter(pq.read_table(dirty / "truth")["impression_id"].to_pylist())


def test_truth_is_written_to_the_day_of_its_impression(dirty: Path) -> None:
    shown = of_type(unique_events(dirty), "ad_impression")
    times = {r["impression_id"]: datetime.fromtimestamp(r["event_time"] / 1e3, UTC) for r in shown}
    for file in (dirty / "truth").iterdir():
        for impression in pq.read_table(file)["impression_id"].to_pylist():
            assert file.stem == f"day={times[impression]:%Y-%m-%d}"


@pytest.mark.parametrize("surface", ["feed", "reels", "messaging"])
@pytest.mark.parametrize(
    ("event_type", "probability"), [("ad_click", "p_click"), ("ad_long_view", "p_long_view")]
)
def test_true_probabilities_are_calibrated_on_the_outcomes(
    dirty: Path, surface: str, event_type: str, probability: str
) -> None:
    events, truth = unique_events(dirty), truth_of(dirty)
    positives = {record["impression_id"] for record in of_type(events, event_type)}
    shown = [
        r["impression_id"] for r in of_type(events, "ad_impression") if r["surface"] == surface
    ]
    assert_calibrated([truth[i][probability] for i in shown], [i in positives for i in shown])


def test_conversion_probability_covers_the_attribution_window(clean: Path) -> None:
    events, truth = unique_events(clean), truth_of(clean)
    clicks = sorted(of_type(events, "ad_click"), key=lambda r: r["event_time"])
    converted = set()
    for conversion in of_type(events, "conversion"):
        key, now = (conversion["user_id"], conversion["item_id"]), conversion["event_time"]
        earlier = [r for r in clicks if (r["user_id"], r["item_id"]) == key]
        last_click = [r for r in earlier if r["event_time"] < now][-1]
        if now - last_click["event_time"] <= ATTRIBUTION_WINDOW_MS:
            converted.add(last_click["impression_id"])
    mature_until_ms = DIRTY.end_ms - ATTRIBUTION_WINDOW_MS - 6 * HOUR_MS
    shown = of_type(events, "ad_impression")
    mature = [r["impression_id"] for r in shown if r["event_time"] < mature_until_ms]
    assert_calibrated([truth[i]["p_conversion"] for i in mature], [i in converted for i in mature])


def test_inverse_propensities_count_the_candidates(clean: Path) -> None:
    shown = of_type(unique_events(clean), "ad_impression")
    assert all(0 < record["propensity"] <= 1 for record in shown)
    count = np.array([1 / record["propensity"] + record["position"] for record in shown])
    assert abs(count.mean() - CANDIDATES) < 4 * count.std() / np.sqrt(count.size)


def test_propensity_equals_the_frequency_of_draws() -> None:
    logits = np.tile([0.0, 1.0, -1.0, 0.5], (40_000, 1))
    order, propensity = sample_without_replacement(logits, np.random.default_rng(0))
    assert (np.sort(order) == np.arange(4)).all()
    softmax = np.exp(logits[0]) / np.exp(logits[0]).sum()
    assert np.bincount(order[:, 0]) / len(order) == pytest.approx(softmax, abs=0.01)
    assert propensity[:, 0] == pytest.approx(softmax[order[:, 0]])
    second = order[order[:, 0] == 1, 1]
    remaining = np.array([softmax[0], 0, softmax[2], softmax[3]]) / (1 - softmax[1])
    assert np.bincount(second, minlength=4) / second.size == pytest.approx(remaining, abs=0.02)


def test_the_ads_of_a_request_are_distinct_and_shown_at_the_same_time(clean: Path) -> None:
    requests: dict[str, list[Record]] = {}
    for record in of_type(unique_events(clean), "ad_impression"):
        requests.setdefault(record["request_id"], []).append(record)
    for slots in requests.values():
        assert len({(r["user_id"], r["surface"], r["event_time"]) for r in slots}) == 1
        assert len({r["item_id"] for r in slots}) == len(slots)


def test_a_record_is_written_to_the_day_of_its_ingest(dirty: Path) -> None:
    for record in valid_records(dirty):
        assert DIRTY.start_ms <= record["event_time"] < record["ingest_time"] < DIRTY.end_ms
    for folder in (dirty / "events").iterdir():
        for line in gzip.decompress((folder / "part-00000.json.gz").read_bytes()).splitlines():
            if b"ingest_time" in line and line.endswith(b"}"):
                ingested = datetime.fromtimestamp(json.loads(line)["ingest_time"] / 1e3, UTC)
                assert folder.name == f"day={ingested:%Y-%m-%d}"


def test_noise_has_the_configured_rates(dirty: Path) -> None:
    records, events = valid_records(dirty), unique_events(dirty)
    duplicates = len(records) - len(events)
    assert duplicates / len(events) == pytest.approx(DIRTY.duplicates, rel=0.15)
    malformed = len(read_lines(dirty, "events")) - len(records)
    assert malformed / len(records) == pytest.approx(DIRTY.malformed, rel=0.15)
    eligible = [  # early enough in the run that they can be late
        r for r in events
        if r["event_time"] < DIRTY.end_ms - 2 * DAY_MS and r["type"] != "conversion"
    ]  # fmt: skip
    delays = np.array([r["ingest_time"] - r["event_time"] for r in eligible])
    assert np.mean(delays > HOUR_MS) == pytest.approx(DIRTY.late, rel=0.15)
    assert delays.max() <= 2 * DAY_MS


def test_a_duplicate_differs_only_in_its_later_ingest_time(dirty: Path) -> None:
    first_copy = {record["event_id"]: record for record in unique_events(dirty)}
    for record in valid_records(dirty):
        original = first_copy[record["event_id"]]
        assert record == original | {"ingest_time": record["ingest_time"]}
    copies = Counter((r["event_id"], r["ingest_time"]) for r in valid_records(dirty))
    assert max(copies.values()) == 1


def test_zero_noise_rates_give_clean_logs(clean: Path) -> None:
    records = [json.loads(line) for line in read_lines(clean, "events")]
    assert all(is_valid(record) for record in records)
    assert len({record["event_id"] for record in records}) == len(records)
    others = [record for record in records if record["type"] != "conversion"]
    assert max(r["ingest_time"] - r["event_time"] for r in others) < HOUR_MS


def test_noise_changes_neither_the_truth_nor_the_events(clean: Path, dirty: Path) -> None:
    assert truth_of(clean) == truth_of(dirty)

    def events_without_ingest_time(run: Path) -> dict[str, Record]:
        return {r["event_id"]: r | {"ingest_time": 0} for r in unique_events(run)}

    assert events_without_ingest_time(clean) == events_without_ingest_time(dirty)


def test_no_event_precedes_its_user_or_item(dirty: Path) -> None:
    users = [json.loads(line) for line in read_lines(dirty, "users")]
    items = [json.loads(line) for line in read_lines(dirty, "items")]
    since = {r["user_id"]: r["changed_time"] for r in reversed(users)}
    since |= {r["item_id"]: r["created_time"] for r in items}
    assert len(items) == DIRTY.posts + DIRTY.ads
    assert len(since) == len(items) + DIRTY.users
    for record in unique_events(dirty):
        assert record["event_time"] >= max(since[record["user_id"]], since[record["item_id"]])


def test_attributes_of_a_few_users_change(dirty: Path) -> None:
    versions = Counter(json.loads(line)["user_id"] for line in read_lines(dirty, "users"))
    assert len(versions) == DIRTY.users
    assert 0 < versions.total() - DIRTY.users < 0.1 * DIRTY.users * DIRTY.days


def test_a_conversion_follows_its_click_and_names_no_impression(clean: Path) -> None:
    events = unique_events(clean)
    clicks = of_type(events, "ad_click")
    conversions = of_type(events, "conversion")
    assert conversions
    for conversion in conversions:
        key = [conversion[name] for name in ("user_id", "item_id", "surface")]
        matches = [r for r in clicks if [r["user_id"], r["item_id"], r["surface"]] == key]
        assert min(r["event_time"] for r in matches) < conversion["event_time"]
        assert min(r["ingest_time"] for r in matches) < conversion["ingest_time"]
        assert "impression_id" not in conversion


def test_users_have_the_configured_mean_and_maximum_of_events(clean: Path) -> None:
    counts = Counter(record["user_id"] for record in unique_events(clean))
    assert max(counts.values()) <= DIRTY.max_events_per_user
    assert counts.total() / DIRTY.users == pytest.approx(DIRTY.events_per_user_mean, rel=0.15)


def test_outcomes_name_logged_impressions_of_the_same_user(clean: Path) -> None:
    events = unique_events(clean)
    user_of = {r["impression_id"]: r["user_id"] for r in of_type(events, "ad_impression")}
    for event_type in ("ad_view", "ad_long_view", "ad_click"):
        for record in of_type(events, event_type):
            assert user_of[record["impression_id"]] == record["user_id"]


def test_need_rises_before_a_purchase_and_falls_after() -> None:
    world = World.draw(DIRTY)
    user, category, time_ms = world.cycles.purchases_between(DIRTY.start_ms, DIRTY.end_ms)
    period_ms = world.taste.period_ms[category]

    def need(periods: float) -> Floats:
        shifted_ms = time_ms + (periods * period_ms).astype(np.int64)
        return world.cycles.need(world.taste, user, category, shifted_ms)

    assert (need(-0.9 * NEED_LEAD_PERIODS) == 1).all()
    assert (need(0.9 * NEED_TAIL_PERIODS) == 1).all()
    assert (need(2 * NEED_TAIL_PERIODS) == -SATIATION_PENALTY).all()
    assert (need(0.6) == 0).all()
    not_cyclic = np.array([np.setdiff1d(np.arange(8), c)[0] for c in world.cycles.category])
    assert (world.cycles.need(world.taste, user, not_cyclic[user], time_ms) == 0).all()


def test_users_buy_with_the_period_of_the_category(clean: Path) -> None:
    period_ms = World.draw(DIRTY).taste.period_ms
    last_purchase: dict[tuple[str, int], int] = {}
    for record in sorted(unique_events(clean), key=lambda r: r["event_time"]):
        if record["type"] == "post_purchase":
            category = int(record["item_id"][1:]) % DIRTY.categories
            key = (record["user_id"], category)
            if key in last_purchase:
                interval_ms = record["event_time"] - last_purchase[key]
                assert interval_ms / period_ms[category] == pytest.approx(1, abs=0.15)
            last_purchase[key] = record["event_time"]


def test_a_folder_of_another_run_is_refused_and_the_same_run_is_kept(
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
    def interrupted_day(
        world: World, day: int, remaining_events: Int64
    ) -> tuple[Events, GroundTruth]:
        if day == 1:
            raise KeyboardInterrupt
        return simulate_day(world, day, remaining_events)

    monkeypatch.setattr("etl.simulator.simulate.simulate_day", interrupted_day)
    with pytest.raises(KeyboardInterrupt):
        simulate(TINY, tmp_path / "run")
    assert not list(tmp_path.iterdir())
