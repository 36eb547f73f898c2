"""Offsets by segment: planted errors are found, noise is not learned, and files are verified."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.array_types import Float64
from etl.errors import UserError
from etl.signature import SIGNING_KEY_VARIABLE, TRUSTED_KEY_VARIABLE
from etl.spec.units import DAY
from ranking.registry.calibration_offsets import OFFSETS_FILE, read_offsets, write_offsets
from ranking.registry.manifest import read_manifest, write_manifest
from ranking.registry.promotion import (
    PromotionConfig,
    PromotionDecision,
    require_calibrated_segments,
)
from ranking.registry.ranker import live_pointer, load_ranker
from ranking.scoring.calibration import Labels, fit_platt, logit, sigmoid
from ranking.scoring.offset_updates import (
    INTERCEPT_HALF_LIFE,
    SEGMENT_HALF_LIFE,
    refresh_offsets,
)
from ranking.scoring.offsets import (
    INTERCEPT,
    CalibrationOffsets,
    LabeledRows,
    RankerCalibration,
    SegmentOffsets,
    SlopeOffset,
)
from ranking.scoring.predictions import batch_segments
from ranking.scoring.segment_calibration import (
    MAX_SIGMA,
    SegmentCalibration,
    range_p_value,
    segment_calibrations,
    worst_segment,
)
from ranking.serving.settings import Settings
from ranking.serving.worker import Worker
from ranking.student.trained import TrainedStudent
from ranking.trainer.calibrate import drop_intercept_and_slope
from tests.ranking.conftest import batch_of
from training.data.reader import ExampleReader

NONE = CalibrationOffsets(surface="feed", labels_until=0)


def draw(p: Float64, rng: np.random.Generator) -> Labels:
    return (rng.uniform(size=len(p)) < p).astype(np.float32)


def rows_with_shifts(shifts: Float64, num_rows: int, seed: int) -> tuple[LabeledRows, Float64]:
    """Rows whose predictions lack the shift of their category, and the true probabilities."""
    rng = np.random.default_rng(seed)
    category = rng.integers(0, len(shifts), num_rows)
    p = sigmoid(rng.normal(-2, 1, num_rows))
    truth = sigmoid(logit(p) + shifts[category])
    return LabeledRows(p, draw(truth, rng), {"category": category}), truth


def refreshed(
    rows: LabeledRows, before: CalibrationOffsets = NONE, until: int = DAY
) -> CalibrationOffsets:
    return refresh_offsets(before, {"click": rows}, until)


def corrected(offsets: CalibrationOffsets, rows: LabeledRows) -> LabeledRows:
    return LabeledRows(sigmoid(shifted(offsets, rows)), rows.labels, rows.segments)


def shifted(offsets: CalibrationOffsets, rows: LabeledRows) -> Float64:
    """The logits of rows with their offsets."""
    logits = logit(rows.probabilities)[:, None]
    return (logits + offsets(logits, rows.segments, ["click"]))[:, 0]


def added(offsets: CalibrationOffsets, *categories: int) -> Float64:
    """What is added to a logit of -2, by category."""
    segments = {"category": np.array(categories)}
    return offsets(np.full((len(categories), 1), -2.0), segments, ["click"])[:, 0]


@settings(max_examples=10)
@given(st.integers(0, 100))
def test_shifts_of_segments_are_found_on_rows_that_were_not_learned(seed: int) -> None:
    shifts = np.random.default_rng(seed).normal(0, 0.5, 20)
    learned, _ = rows_with_shifts(shifts, 200_000, seed)
    tested, truth = rows_with_shifts(shifts, 20_000, seed + 1000)
    result = corrected(refreshed(learned), tested)
    errors = np.abs(logit(result.probabilities) - logit(truth))
    assert errors.max() < 0.2 and errors.mean() < 0.05
    before, after = (
        worst_segment(list(segment_calibrations("click", rows))) for rows in (tested, result)
    )
    assert before and after and before[1] > 4 and after[1] < MAX_SIGMA


@settings(max_examples=10)
@given(st.integers(0, 100))
def test_segments_that_do_not_differ_cost_almost_nothing(seed: int) -> None:
    learned, _ = rows_with_shifts(np.zeros(200), 20_000, seed)
    tested, truth = rows_with_shifts(np.zeros(200), 20_000, seed + 1000)
    result = corrected(refreshed(learned), tested).probabilities
    excess = truth * np.log(truth / result) + (1 - truth) * np.log((1 - truth) / (1 - result))
    assert excess.mean() < 2e-4
    assert np.abs(logit(result) - logit(truth)).max() < 0.25


def test_few_labels_move_an_offset_little_and_none_do_not() -> None:
    rows, _ = rows_with_shifts(np.zeros(3), 3000, 0)
    rare = np.where(np.arange(3000) < 2, 7, 0)
    labels = np.where(rare == 7, 1, rows.labels).astype(np.float32)
    offsets = refreshed(LabeledRows(rows.probabilities, labels, {"category": rare}))
    table = offsets.by_objective["click"]["category"].table
    assert 0 < table[7] < 0.05
    unseen = added(offsets, 3, 500)
    intercept = offsets.by_objective["click"][INTERCEPT].table[0]
    slope = offsets.slopes["click"]
    assert unseen == pytest.approx(intercept + slope.offset * (-2 - slope.center))
    empty = LabeledRows(np.zeros(0), np.zeros(0, np.float32), {"category": np.zeros(0, np.int64)})
    assert not refreshed(empty).by_objective["click"]["category"].values
    assert added(refreshed(empty), 3) == 0


def test_a_refresh_in_parts_equals_one_up_to_the_approximation() -> None:
    shifts = np.array([0.5, -0.5, 0.0, 0.2])
    first, _ = rows_with_shifts(shifts, 20_000, 1)
    second, _ = rows_with_shifts(shifts, 20_000, 2)
    both = LabeledRows(
        np.append(first.probabilities, second.probabilities),
        np.append(first.labels, second.labels),
        {"category": np.append(first.segments["category"], second.segments["category"])},
    )
    at_once = refreshed(both, until=0)
    in_parts = refreshed(second, refreshed(first, until=0), until=0)
    for segment in (INTERCEPT, "category"):
        one, two = (o.by_objective["click"][segment] for o in (at_once, in_parts))
        assert one.values == two.values
        np.testing.assert_allclose(one.precisions, two.precisions, rtol=0.02)
    np.testing.assert_allclose(added(at_once, *range(4)), added(in_parts, *range(4)), atol=0.04)


def test_a_fit_on_few_labels_is_not_repeated_by_the_offsets_of_the_same_labels() -> None:
    """20 positives are predicted and 10 found: the fit goes half of the way, offsets no further."""
    rng = np.random.default_rng(0)
    p = sigmoid(rng.normal(-3.2, 0.7, 400))
    p *= 20 / p.sum()
    labels = np.zeros(400, np.float32)
    labels[rng.choice(400, 10, replace=False, p=p / p.sum())] = 1
    segments = {"category": rng.integers(0, 5, 400)}
    fitted = fit_platt(logit(p), labels)
    fit = fitted(logit(p))
    offsets = refreshed(LabeledRows(fit, labels, segments))
    calibration = RankerCalibration({"click": fitted}, offsets)
    twice, once = (
        found(logit(p)[:, None], segments, ["click"]).sum()
        for found in (calibration, drop_intercept_and_slope(calibration))
    )
    assert 13 < fit.sum() < 15 and once == pytest.approx(fit.sum(), rel=0.01)
    assert twice < 0.9 * fit.sum()


@settings(max_examples=10)
@given(st.floats(0.5, 1.5), st.integers(0, 100))
def test_a_slope_is_found_and_few_labels_leave_it(slope: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    p = sigmoid(rng.normal(-2, 1, 60_000))
    truth = sigmoid(slope * (logit(p) + 2) - 2)
    rows = LabeledRows(p, draw(truth, rng), {})
    found = sigmoid(shifted(refreshed(rows), rows))
    assert np.abs(logit(found) - logit(truth)).mean() < 0.06
    draws = np.arange(800).reshape(40, 20)
    few = [LabeledRows(p[chosen], rows.labels[chosen], {}) for chosen in draws]
    moved = [abs(refreshed(some).slopes["click"].offset) for some in few]
    assert np.mean(moved) < 0.2


def test_old_labels_count_less_by_their_age_until_they_are_forgotten() -> None:
    rows, _ = rows_with_shifts(np.array([1.0, -1.0]), 20_000, 0)
    nothing = LabeledRows(np.zeros(0), np.zeros(0, np.float32), {"category": np.zeros(0, np.int64)})
    before = refreshed(rows).by_objective["click"]
    for segment, half_life in ((INTERCEPT, INTERCEPT_HALF_LIFE), ("category", SEGMENT_HALF_LIFE)):
        after = refreshed(nothing, refreshed(rows), DAY + half_life).by_objective["click"][segment]
        expected = np.array(before[segment].precisions) / 2
        np.testing.assert_allclose(after.precisions, expected)
    intercept = before[INTERCEPT]
    (precision,), (offset,), prior = intercept.precisions, intercept.offsets, 10.0
    halved = 0.5 * offset * (precision + prior) / (0.5 * precision + prior)
    day_later = refreshed(nothing, refreshed(rows), DAY + INTERCEPT_HALF_LIFE).by_objective["click"]
    assert day_later[INTERCEPT].offsets[0] == pytest.approx(halved)
    forgotten = refreshed(nothing, refreshed(rows), 400 * DAY).by_objective["click"]
    assert not forgotten["category"].values and not forgotten[INTERCEPT].values


def test_segments_that_a_spec_drops_are_dropped() -> None:
    rows, _ = rows_with_shifts(np.array([1.0, -1.0]), 2000, 0)
    other = LabeledRows(rows.probabilities, rows.labels, {"format": rows.segments["category"]})
    offsets = refreshed(other, refreshed(rows))
    assert set(offsets.by_objective["click"]) == {INTERCEPT, "format"}


def test_calibrated_predictions_are_rarely_called_uncalibrated() -> None:
    """At most 5 % of the worst segments of calibrated predictions are beyond the 5 % line."""
    rng, beyond = np.random.default_rng(0), 0
    for _ in range(200):
        p = rng.beta(1, 20, 10_000)
        rows = LabeledRows(p, draw(p, rng), {"category": rng.geometric(0.1, len(p))})
        worst = worst_segment(list(segment_calibrations("click", rows)))
        assert worst
        beyond += worst[1] > 1.96
    assert beyond <= 0.05 * 200 + 2 * np.sqrt(0.05 * 0.95 * 200)


def test_the_range_of_a_brownian_motion_has_its_known_distribution() -> None:
    steps = np.random.default_rng(0).normal(0, 1, (20_000, 2000)).cumsum(1) / np.sqrt(2000)
    walk_range = np.maximum(steps.max(1), 0) - np.minimum(steps.min(1), 0)
    for x in (1.0, 1.5, 2.0, 2.5):
        assert abs(np.mean(walk_range >= x) - range_p_value(x)) < 0.03
    assert range_p_value(0.1) == 1 and 0 < range_p_value(50) < 1e-300
    values = [range_p_value(x) for x in np.linspace(0, 8, 200)]
    assert (np.diff(values) <= 1e-9).all()


def test_an_error_that_cancels_over_scores_is_found() -> None:
    rng = np.random.default_rng(0)
    z = rng.normal(-1, 1, 30_000)
    labels = draw(sigmoid(0.5 * (z + 1) - 1), rng)  # too extreme at both ends
    p = sigmoid(z)
    p = sigmoid(z + logit(labels.mean(keepdims=True).astype(float)) - logit(p.mean(keepdims=True)))
    (found,) = segment_calibrations("click", LabeledRows(p, labels, {}))
    assert abs(found.ratio - 1) < 0.05 and found.sigma > 6


def test_segments_with_few_expected_outcomes_are_not_judged() -> None:
    p = np.full(100, 0.1)
    rows = LabeledRows(p, np.ones(100, np.float32), {"category": np.arange(100)})
    assert not list(segment_calibrations("click", rows))
    assert worst_segment([]) is None


def test_the_worst_of_many_segments_is_judged_by_how_many_there_are() -> None:
    def segment(p_value: float) -> SegmentCalibration:
        return SegmentCalibration(
            objective="click", segment="s", value=0, rows=1, positives=1, predicted=1,
            p_value=p_value,
        )  # fmt: skip

    worst = segment(0.001)
    alone, among = worst_segment([worst]), worst_segment([worst, *[segment(0.5)] * 99])
    assert alone and among and alone[0] == among[0] == worst
    assert alone[1] == pytest.approx(3.29, abs=0.01) and among[1] == pytest.approx(1.64, abs=0.01)


@pytest.fixture
def offsets() -> CalibrationOffsets:
    rows, _ = rows_with_shifts(np.array([1.0, -1.0]), 2000, 0)
    return refreshed(rows).model_copy(update={"version": "v1"})


def test_offsets_are_read_as_they_were_written(offsets: CalibrationOffsets, tmp_path: Path) -> None:
    write_offsets(tmp_path, offsets)
    assert read_offsets(tmp_path, "v1") == offsets


def test_offsets_of_others_or_damaged_ones_are_refused(
    offsets: CalibrationOffsets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="is missing: run `gemline rank calibrate` again"):
        read_offsets(tmp_path, "v1")
    write_offsets(tmp_path, offsets)
    with pytest.raises(UserError, match="is of ranker v1, not of v2"):
        read_offsets(tmp_path, "v2")
    path = tmp_path / OFFSETS_FILE
    unsigned = path.read_text()
    path.write_text(unsigned[:-20])
    with pytest.raises(UserError, match="is damaged"):
        read_offsets(tmp_path, "v1")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    monkeypatch.setenv(TRUSTED_KEY_VARIABLE, key.public_key().public_bytes_raw().hex())
    path.write_text(unsigned)
    with pytest.raises(UserError, match="is not signed"):
        read_offsets(tmp_path, "v1")
    monkeypatch.setenv(SIGNING_KEY_VARIABLE, key.private_bytes_raw().hex())
    write_offsets(tmp_path, offsets)
    assert read_offsets(tmp_path, "v1") == offsets
    shutil.copy(path, tmp_path / "copy")
    path.write_text(path.read_text().replace("feed", "reel"))
    with pytest.raises(UserError, match="was changed after signing"):
        read_offsets(tmp_path, "v1")


@pytest.fixture
def with_offsets(folder: Path, tmp_path: Path) -> Path:
    """A ranker with offsets for all segments of its spec."""
    copy = tmp_path / "ranker"
    shutil.copytree(folder, copy)
    manifest = read_manifest(copy).model_copy(update={"has_calibration_offsets": True})
    write_manifest(copy, manifest)
    rng = np.random.default_rng(0)
    segments = {
        name: SegmentOffsets(values=tuple(range(20)), offsets=tuple(rng.normal(size=20)))
        for name in (*manifest.spec.calibration_segments, INTERCEPT)
    }
    offsets = CalibrationOffsets(
        surface=manifest.surface,
        version=manifest.version,
        labels_until=0,
        by_objective=dict.fromkeys(manifest.spec.objectives, segments),
        slopes=dict.fromkeys(manifest.spec.objectives, SlopeOffset(center=-1.0, offset=0.3)),
    )
    write_offsets(copy, offsets)
    return copy


def test_a_ranker_adds_the_offsets_of_the_segments_of_each_candidate(
    with_offsets: Path, student: TrainedStudent, reader: ExampleReader
) -> None:
    ranker, batch = load_ranker(with_offsets), batch_of(reader, 60)
    inputs = student.input_builder(batch)
    user_state = ranker.user_state(inputs.requests)
    found = ranker.score(user_state, inputs.candidates).probabilities[inputs.candidate_index.mask]
    without = replace(ranker, offsets=None)
    p = without.score(user_state, inputs.candidates).probabilities[inputs.candidate_index.mask]
    offsets = ranker.offsets
    assert offsets
    by_segment = offsets.by_objective["click"]

    def offset(segment: str, value: int) -> float:
        table = by_segment[segment]
        return table.offsets[value] if value < len(table.offsets) else 0.0

    slope = offsets.slopes["click"]
    expected = by_segment[INTERCEPT].offsets[0] + slope.offset * (logit(p) - slope.center)
    for row in range(len(batch)):
        user = int(batch.request_index[row])
        for segment in ("category", "format", "advertiser_id", "goal"):
            expected[row] += offset(segment, int(batch.row_categorical[f"item_{segment}"][row]))
        expected[row] += offset("device", int(batch.row_categorical["ctx_device"][row]))
        expected[row] += offset("tier", int(batch.user_categorical["user_tier"][user]))
        is_new = int(batch.item_index[row]) >= ranker.manifest.num_items
        expected[row] += offset("new_item", int(is_new))
    np.testing.assert_allclose(logit(found) - logit(p), expected, atol=1e-6)
    assert {int(i) >= ranker.manifest.num_items for i in batch.item_index} == {True, False}
    segments = batch_segments(batch, reader.lake.spec, ranker.manifest.num_items)
    of_candidates = ranker.segment_values(user_state, inputs.candidates)
    for name, values in segments.items():
        assert (of_candidates[name][inputs.candidate_index.mask] == values).all(), name


def test_a_service_uses_offsets_that_are_refreshed_and_keeps_its_own_if_they_are_damaged(
    with_offsets: Path, settings: Settings
) -> None:
    live = live_pointer(settings.lake, "feed").live_folder
    assert isinstance(live, Path)
    shutil.rmtree(live)
    shutil.copytree(with_offsets, live)
    version = read_manifest(live).version
    worker = Worker(settings)
    first = worker.rankers.for_surface("feed").offsets
    assert first and first == read_offsets(live, version)
    refreshed_offsets = first.model_copy(update={"labels_until": 7, "by_objective": {}})
    write_offsets(live, refreshed_offsets)
    asyncio.run(worker.refresh())
    assert worker.rankers.for_surface("feed").offsets == refreshed_offsets
    (live / OFFSETS_FILE).write_text("{")
    asyncio.run(worker.refresh())
    assert worker.rankers.for_surface("feed").offsets == refreshed_offsets
    assert "is damaged" in worker.rankers.errors["feed"]
    worker.close()


def test_a_ranker_whose_offsets_are_missing_is_not_served(with_offsets: Path) -> None:
    (with_offsets / OFFSETS_FILE).unlink()
    with pytest.raises(UserError, match=r"calibration_offsets\.json is missing"):
        load_ranker(with_offsets)


@pytest.mark.parametrize(("ratio", "positives", "promoted"), [(1.5, 400, False), (1.1, 4000, True)])
def test_the_gate_refuses_a_segment_that_is_far_off_beyond_noise(
    reader: ExampleReader, ratio: float, positives: int, promoted: bool
) -> None:
    spec = reader.lake.spec
    rng = np.random.default_rng(0)
    p = np.full(positives * 4, 0.25)
    labels = draw(p / ratio, rng)
    category = np.full(len(p), 5)
    rows = LabeledRows(p, labels, {"category": category})
    segments = [s for s in segment_calibrations("click", rows) if s.segment == "category"]
    assert segments[0].sigma > MAX_SIGMA
    decision = PromotionDecision("v1", True, ("nothing is better outside noise",))
    judged = require_calibrated_segments(decision, segments, spec, PromotionConfig())
    assert judged.promoted == promoted
    assert "worst of 1 segments: click of category #5" in judged.reasons[0]
    assert any("not calibrated" in reason for reason in judged.reasons) != promoted
    assert ("not calibrated" in judged.reasons[-1]) != promoted  # why it is not promoted
    refused = require_calibrated_segments(
        replace(decision, promoted=False), segments, spec, PromotionConfig()
    )
    assert not refused.promoted


def test_the_gate_refuses_a_segment_whose_errors_cancel(reader: ExampleReader) -> None:
    rng, rows = np.random.default_rng(0), 20_000
    p = np.repeat([0.1, 0.3], rows)
    labels = draw(np.repeat([0.2, 0.2], rows), rng)
    labeled = LabeledRows(p, labels, {"category": np.full(len(p), 5)})
    segments = [s for s in segment_calibrations("click", labeled) if s.segment == "category"]
    assert segments[0].ratio == pytest.approx(1, abs=0.03)
    assert segments[0].relative_error == pytest.approx(0.25, abs=0.03)
    decision = PromotionDecision("v1", True, ())
    for tolerance, promoted in ((0.2, False), (0.3, True)):
        config = PromotionConfig(segment_tolerance=tolerance)
        judged = require_calibrated_segments(decision, segments, reader.lake.spec, config)
        assert judged.promoted == promoted, judged.reasons
