"""Net rates: what is taken back after labels were final lowers the value, not the label."""

from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.system.warm_start import changed_spec
from etl.attributes import load_attributes
from etl.ingest.run import ingest
from etl.labels import label_impressions
from etl.retractions import record_late_retractions
from etl.simulator.config import RefundConfig, SimulatorConfig
from etl.simulator.simulate import simulate
from etl.tables import label_schemas
from etl.tables.arrow import replace_rows
from etl.tables.lake import Lake, arrow_schema
from features.examples import build_examples
from features.history.build import build_history
from features.items import index_items
from ranking.registry.ranker import load_ranker
from ranking.scoring.calibration import logit, sigmoid
from ranking.scoring.offset_updates import SEGMENT_HALF_LIFE, refresh_net_rates
from ranking.scoring.offsets import (
    BASE_NET_RATE,
    INTERCEPT,
    CalibrationOffsets,
    LabeledRows,
    SegmentOffsets,
)
from ranking.student.trained import TrainedStudent
from ranking.trainer.net_rates import (
    _retracted_impressions,
    first_window,
    outcomes_to_learn,
    refresh_from_retractions,
)
from tests.pipeline import rows
from tests.ranking.auctions import bids_of
from tests.ranking.conftest import batch_of
from training.data.label_window import LabelWindow
from training.data.reader import ExampleReader

pytestmark = pytest.mark.spark

DAY, NUM_DAYS = 86400, 4
FIRST, LAST = date(2026, 1, 1), date(2026, 1, NUM_DAYS)
SIMULATOR = SimulatorConfig(
    name="refunds", seed=5, start=FIRST, days=NUM_DAYS, users=400, events_per_user_mean=150,
    max_events_per_user=600, posts=200, ads_start=40, ads_per_day=12, advertisers=10, categories=8,
    duplicates=0.0, late=0.0, malformed=0.0, refunds=RefundConfig(rate=0.4, mean_delay_hours=18),
)  # fmt: skip


def with_refunds(spec: dict[str, Any]) -> None:
    spec["events"]["refund"] = {"role": "retraction"}
    spec["objectives"]["conversion"]["window"] = "12h"
    spec["objectives"]["conversion"]["retracted_by"] = {"event": "refund", "within": "1d"}
    spec["sources"]["events"]["columns"]["retracts"] = "refunded_event"


SPEC = changed_spec(with_refunds)
CONVERSION = list(SPEC.objectives).index("conversion")


@pytest.fixture(scope="module")
def refunds(spark: object, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Tables of simulated logs with refunds."""
    root = tmp_path_factory.mktemp("refunds")
    simulate(SIMULATOR, root / "raw")
    lake, days = Lake(str(root / "lake"), SPEC), (FIRST, LAST)
    ingest(lake, str(root / "raw"), days)
    load_attributes(lake, str(root / "raw"), days)
    for step in (label_impressions, record_late_retractions, index_items, build_history):
        step(lake, days)
    build_examples(lake, days)
    return lake


@pytest.mark.proof  # simulates logs of its own
def test_net_rates_learn_each_outcome_once_when_its_time_for_a_retraction_has_ended(
    refunds: Lake,
) -> None:
    reader = ExampleReader.latest(refunds, max_length=8)
    retracted = {
        row["impression_id"]
        for row in rows(refunds, "late_retractions")
        if row["outcomes_left"] == 0 and row["retracted_ts"] - row["label_mature_ts"] <= DAY
    }
    final = {
        row["impression_id"]: row["label_mature_ts_conversion"] // 10**6
        for row in rows(refunds, "impressions")
        if row["label_conversion"] == 1
    }
    assert 3 < len(retracted & final.keys()) < len(final) - 3
    first, total = SPEC.day_start(FIRST), 0
    for number in range(NUM_DAYS):
        window = LabelWindow(first + number * DAY, first + (number + 1) * DAY)
        outcomes = outcomes_to_learn(reader, 10**6, "conversion", window)
        ended = [name for name, ts in final.items() if window.start - DAY <= ts < window.end - DAY]
        assert len(outcomes.labels) == len(ended)
        assert outcomes.labels.sum() == sum(name not in retracted for name in ended)
        total += len(ended)
    assert 0 < total < len(final)  # the time of the last ones has not ended
    none = CalibrationOffsets(surface="feed", labels_until=0)
    learned = refresh_from_retractions(none, reader, 10**6, LabelWindow(0, SPEC.day_end(LAST)))
    known = [name for name, ts in final.items() if ts < SPEC.day_end(LAST) - DAY]
    net = np.mean([name not in retracted for name in known])
    intercept = learned.net_rates["conversion"][INTERCEPT].offsets[0]
    found = float(sigmoid(logit(np.array([BASE_NET_RATE])) + intercept)[0])
    assert net < found < BASE_NET_RATE - (BASE_NET_RATE - net) / 5  # few labels against the prior


def test_refunds_of_the_day_after_a_label_was_final_count(tmp_path: Path) -> None:
    """One becomes visible three hours later, in the morning."""
    lake, noon, hour = Lake(str(tmp_path), SPEC), SPEC.day_start(FIRST) + DAY // 2, 3600
    mature = noon + 14 * hour
    refund = {
        "impression_id": "shown", "user_id": "u1", "objective": "conversion", "surface": 0,
        "outcome_id": "bought", "retraction_id": "refunded", "retracted_ts": noon + 17 * hour,
        "label_mature_ts": mature, "outcomes_left": 0, "value": None, "bucket": 0,
        "day": FIRST + timedelta(days=1),
    }  # fmt: skip
    schema = label_schemas.late_retractions(SPEC)
    table = pa.Table.from_pylist([refund], arrow_schema(schema))
    replace_rows(lake, schema, table, "day IS NOT NULL", {})
    found = []
    for number in range(5):
        start = SPEC.day_start(FIRST) + number * DAY
        window = LabelWindow(start, start + DAY)
        final = window.start - DAY <= mature < window.end - DAY
        found.append((final, len(_retracted_impressions(lake, "conversion", DAY, window)) > 0))
    assert (True, True) in found and (True, False) not in found


def test_a_new_ranker_reads_the_days_that_have_not_decayed() -> None:
    end = 100 * DAY
    window = first_window(end)
    assert window.end == end and 0.5 ** ((end - window.start) / SEGMENT_HALF_LIFE) < 0.02
    assert end - window.start < 50 * DAY  # not all days of a long log
    assert first_window(DAY) == LabelWindow(0, DAY)


def test_specs_without_retractions_have_no_net_rates(lake: Lake) -> None:
    reader = ExampleReader.latest(lake, max_length=8)
    offsets = CalibrationOffsets(surface="feed", labels_until=0)
    assert refresh_from_retractions(offsets, reader, 1, LabelWindow(0, 10**10)) is offsets


def test_net_rates_of_segments_are_found() -> None:
    rng = np.random.default_rng(0)
    category = rng.integers(0, 8, 40_000)
    rates = np.linspace(0.5, 0.98, 8)
    kept = (rng.random(len(category)) < rates[category]).astype(np.float32)
    rows = LabeledRows(np.full(len(kept), BASE_NET_RATE), kept, {"category": category})
    offsets = CalibrationOffsets(surface="feed", labels_until=0)
    learned = refresh_net_rates(offsets, {"conversion": rows}, DAY)
    found = learned.net_rate({"category": np.arange(8)}, ["click", "conversion"])
    assert (found[:, 0] == 1).all()
    np.testing.assert_allclose(found[:, 1], rates, atol=0.03)


def test_hourly_refreshes_find_the_rate_of_outcomes_that_are_few_a_day() -> None:
    rng = np.random.default_rng(0)
    offsets = CalibrationOffsets(surface="feed", labels_until=0)
    for _ in range(21 * 24):
        kept = (rng.random(4) < 0.6).astype(np.float32)
        rows = LabeledRows(np.full(len(kept), BASE_NET_RATE), kept, {})
        offsets = refresh_net_rates(offsets, {"conversion": rows}, 3600)
    assert float(offsets.net_rate({}, ["conversion"])[..., 0]) == pytest.approx(0.6, abs=0.06)


def test_the_auction_values_outcomes_net_of_retractions(
    folder: Path, student: TrainedStudent, reader: ExampleReader
) -> None:
    ranker, batch = load_ranker(folder), batch_of(reader, 1)
    inputs = student.input_builder(batch)
    segment = SegmentOffsets(values=(0,), offsets=(-2.0,))
    offsets = CalibrationOffsets(
        surface="feed", labels_until=0, net_rates={"conversion": {INTERCEPT: segment}}
    )
    with_rates = replace(ranker, offsets=offsets)
    count = int(inputs.candidates.mask.sum())
    sales, clicks = (bids_of([2.0] * count, [goal] * count) for goal in ("sales", "traffic"))
    gross = ranker.rank(inputs.requests, inputs.candidates, sales)
    net = with_rates.rank(inputs.requests, inputs.candidates, sales)
    rate = float(sigmoid(logit(np.array([BASE_NET_RATE])) - 2)[0])
    assert [ad.probabilities for ad in net] == [ad.probabilities for ad in gross]
    for before, after in zip(gross, net, strict=True):
        assert after.expected_value == pytest.approx(before.expected_value * rate)
    traffic = with_rates.rank(inputs.requests, inputs.candidates, clicks)
    expected = ranker.rank(inputs.requests, inputs.candidates, clicks)
    assert [ad.expected_value for ad in traffic] == [ad.expected_value for ad in expected]
