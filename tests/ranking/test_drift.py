"""Drift is what GEM said of a day before it learned it, over what is known to have happened."""

from collections import Counter
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from etl.tables import arrow, contracts
from etl.tables.lake import Lake
from etl.tables.schema import arrow_schema
from ranking.report import drift
from tests.conftest import FIRST, LAST
from tests.pipeline import rows
from training.trials import linked


@pytest.fixture
def own(lake: Lake, tmp_path: Path) -> Lake:
    """The same tables, with logits that GEM might have told."""
    made = linked(lake, tmp_path / "lake")
    contract, rng = contracts.knowledge(lake.spec), np.random.default_rng(0)
    told = [
        {
            "impression_id": row["impression_id"], "fm_version": "v",
            "fm_trained_until": row["day"] - timedelta(days=1), "embedding": [],
            "day": row["day"], "bucket": row["bucket"],
        } | {f"logit_{name}": float(rng.normal(-2)) for name in lake.spec.objectives}
        for row in rows(lake, "impressions") if row["day"] > FIRST
    ]  # fmt: skip
    table = pa.Table.from_pylist(told, arrow_schema(contract))
    arrow.replace(made, contract, table, f"day >= '{FIRST}'", {})
    return made


@pytest.mark.parametrize("landed", [LAST, LAST - timedelta(days=1)])
def test_only_labels_that_were_final_count(
    own: Lake, monkeypatch: pytest.MonkeyPatch, landed
) -> None:
    monkeypatch.setattr(drift, "FEWEST", 1)
    shown = {row["impression_id"]: row for row in rows(own, "impressions")}
    said, happened = Counter(), Counter()
    for told in rows(own, "knowledge"):
        row = shown[told["impression_id"]]
        for name in own.spec.objectives:
            ready = row[f"ready_{name}"] <= own.spec.day_end(landed) * 1_000_000
            if row[f"label_{name}"] is not None and ready:
                key = row["day"], row["surface"], name
                said[key] += 1 / (1 + np.exp(-told[f"logit_{name}"]))
                happened[key] += row[f"label_{name}"]
    found = {(d.day, own.spec.surface_codes[d.surface], d.objective): d.ratio
             for d in drift.drift(own, landed)}  # fmt: skip
    expected = {key: said[key] / n for key, n in happened.items() if n}
    assert found == pytest.approx(expected, rel=1e-5)
    assert any(day == landed for day, _, _ in found)


def test_days_with_few_outcomes_say_nothing(own: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "FEWEST", 10**9)
    assert drift.drift(own, LAST) == []


def test_without_knowledge_there_is_no_drift(lake: Lake, tmp_path: Path) -> None:
    assert drift.drift(linked(lake, tmp_path / "none"), LAST) == []
