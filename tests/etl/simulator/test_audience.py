"""Labels of providers, targeted ads and audits of the simulator agree with its logs."""

import gzip
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from etl.simulator.audience import Audience
from etl.simulator.config import AGE_BANDS, SimulatorConfig
from etl.simulator.simulate import simulate
from etl.simulator.world import World
from tests.etl.simulator.simulated_logs import Record, of_type, read_lines, unique_events
from tests.etl.simulator.test_simulator import CLEAN, TINY, contents

PROVIDERS = [
    {"name": "first", "coverage": 0.9, "accuracy": 0.8},
    {"name": "second", "coverage": 0.7, "accuracy": 0.1, "copies": "first", "copy_rate": 0.9},
]
AUDIENCE = {"providers": PROVIDERS, "panel": 1.0, "min_panel": 1}


def with_audience(**changes: object) -> SimulatorConfig:
    """A run with users who are always shown ads, and audits of all impressions."""
    values = TINY.model_dump() | CLEAN | {"users": 200, "audience": AUDIENCE | changes}
    return SimulatorConfig.model_validate(values)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audience") / "run"
    simulate(with_audience(), folder)
    return folder


def records(run: Path, folder: str) -> list[Record]:
    return [_parse(line) for line in read_lines(run, folder)]


def test_targeted_ads_reach_only_users_with_a_bought_label() -> None:
    world = World.draw(with_audience(targeted_advertisers=1.0, relabel_rate=0.0))
    audience = world.audience
    assert isinstance(audience, Audience)
    users, advertisers = np.arange(200), np.arange(10)
    eligible = audience.is_eligible(users, np.tile(advertisers, (200, 1)))
    for user, advertiser in zip(*np.nonzero(eligible), strict=True):
        label = audience.labels[user, audience.provider[advertiser]]
        assert label >= 0 and audience.is_bought[advertiser, label]
    assert 0.05 < eligible.mean() < 0.6
    everyone = World.draw(with_audience(targeted_advertisers=0.0)).audience
    assert everyone is not None and everyone.is_eligible(users, advertisers[None]).all()


def test_a_provider_that_copies_agrees_with_the_other() -> None:
    audience = World.draw(with_audience()).audience
    assert audience is not None
    first, second = audience.labels[(audience.labels >= 0).all(1)].T
    assert np.mean(first == second) > 0.85


def test_audits_report_the_age_bands_of_the_users_of_the_impressions(run: Path) -> None:
    ads = {row["item_id"]: row for row in records(run, "items") if row["kind"] == "ad"}
    expected: Counter[tuple[str, str, str]] = Counter()
    for day in sorted(path.name[:14] for path in (run / "audits").iterdir()):
        ages = {
            row["user_id"]: row["age_band"]
            for path in sorted((run / "users").iterdir())
            if path.name[:14] <= day
            for row in map(_parse, _lines(path))
        }
        shown = [_parse(line) for path in (run / "events" / day).iterdir() for line in _lines(path)]
        for event in of_type(shown, "ad_impression"):
            campaign = ads[event["item_id"]]["advertiser_id"]
            expected[day, campaign, ages[event["user_id"]]] += 1
        for row in map(_parse, _lines(run / "audits" / f"{day}.json.gz")):
            people = expected[day, row["campaign"], row["age_band"]]
            assert row["share"] * row["panel"] == pytest.approx(people, abs=0.01)
            expected[day, row["campaign"], row["age_band"]] = 0
    assert not any(expected.values())


def _lines(path: Path) -> list[bytes]:
    return gzip.decompress(path.read_bytes()).splitlines()


def _parse(line: bytes) -> Record:
    record: Record = json.loads(line)
    return record


def test_audits_do_not_change_the_logs(run: Path, tmp_path: Path) -> None:
    simulate(with_audience(panel=0.2), tmp_path / "other")
    logs, others = (
        {name: data for name, data in contents(folder).items() if "audits" not in name}
        for folder in (run, tmp_path / "other")
    )
    logs.pop("simulator.json"), others.pop("simulator.json")
    assert logs == others
    simulate(TINY, tmp_path / "without")
    assert not {"audits", "audience_labels"} & {
        path.name for path in (tmp_path / "without").iterdir()
    }


def test_labels_change_at_the_stated_rate(run: Path) -> None:
    by_day = Counter(
        record["labelled_time"] // 86_400_000 for record in records(run, "audience_labels")
    )
    first, *later = [count for _, count in sorted(by_day.items())]
    assert first == 2 * 200 and len(later) == 2
    assert all(2 <= count <= 20 for count in later)  # of 400, at a rate of 0.02
    assert {record["age_band"] for record in records(run, "audience_labels")} <= {
        *AGE_BANDS,
        "unknown",
    }
    assert len(unique_events(run)) > 1000
