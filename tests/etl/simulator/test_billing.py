"""Campaigns are billed their bids for the distinct events of their goals."""

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from etl.simulator.config import SimulatorConfig
from etl.simulator.simulate import simulate
from tests.etl.simulator.test_simulator import CLEAN, TINY

PAID = {"awareness": "ad_long_view", "traffic": "ad_click", "sales": "conversion"}


def lines(folder: Path, pattern: str) -> list[dict[str, Any]]:
    """The records of all files that match a pattern."""
    files = sorted(folder.glob(pattern))
    texts = (gzip.decompress(file.read_bytes()).decode() for file in files)
    return [json.loads(line) for text in texts for line in text.splitlines()]


def test_spend_is_the_bids_of_the_goals_that_were_reached(tmp_path: Path) -> None:
    values = TINY.model_dump() | CLEAN | {"users": 200, "billing": True}
    simulate(SimulatorConfig(**values), tmp_path / "billed")
    ads = {ad["item_id"]: ad for ad in lines(tmp_path / "billed", "items/*.gz") if "goal" in ad}
    expected: dict[str, float] = defaultdict(float)
    for event in lines(tmp_path / "billed", "events/*/*.gz"):
        ad = ads.get(event["item_id"])
        if ad and event["type"] == PAID[ad["goal"]]:
            expected[ad["advertiser_id"]] += ad["bid"]
    found: dict[str, float] = defaultdict(float)
    for row in lines(tmp_path / "billed", "spend/*.gz"):
        found[row["campaign"]] += row["spend"]
    assert found.keys() == expected.keys() and len(found) > 3
    for campaign, spend in expected.items():
        assert found[campaign] == pytest.approx(spend, abs=1e-3 * len(expected))
    simulate(SimulatorConfig(**(values | {"billing": None})), tmp_path / "free")
    assert not (tmp_path / "free" / "spend").exists()
    for kind in ("events", "users", "items"):
        free, billed = (lines(tmp_path / run, f"{kind}/**/*.gz") for run in ("free", "billed"))
        assert free == billed


def test_targets_are_returns_on_the_mean_purchase_of_some_ads_for_sales(tmp_path: Path) -> None:
    values = TINY.model_dump() | CLEAN | {"users": 200}
    simulate(SimulatorConfig(**values), tmp_path / "without")
    simulate(SimulatorConfig(**(values | {"target_roas_share": 0.5})), tmp_path / "with")
    events = (lines(tmp_path / run, "events/**/*.gz") for run in ("without", "with"))
    assert next(events) == next(events)
    ads = [item for item in lines(tmp_path / "with", "items/*.gz") if "goal" in item]
    sales = [ad for ad in ads if ad["goal"] == "sales"]
    targets = [ad for ad in ads if "target_roas" in ad]
    assert all(ad["goal"] == "sales" for ad in targets)
    assert 0.2 < len(targets) / len(sales) < 0.8
    assert all(ad["target_roas"] > 0 for ad in targets)
    without = [ad | {"target_roas": None} for ad in lines(tmp_path / "without", "items/*.gz")]
    assert without == [ad | {"target_roas": None} for ad in lines(tmp_path / "with", "items/*.gz")]
