"""The report: its numbers are those of the run's files, and its lead lists the next steps."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from sklearn.metrics import log_loss

from etl.errors import UserError
from etl.spec.units import DaySplit
from etl.tables.lake import Lake
from ranking.registry.ranker import latest_trained_pointer, live_pointer
from ranking.registry.records import PromotionRecord, RefitRecord, write_promotion_record
from ranking.report.build import build_report
from ranking.report.data import clustered_standard_error, compare_models, load_predictions
from ranking.report.next_steps import (
    CalibrationCheck,
    RankerState,
    calibration_checks,
    next_steps,
    ranker_states,
)
from ranking.report.study import StudyResult
from tests import pipeline
from tests.conftest import FIRST, LAST
from tests.features.histograms import write_statistics
from tests.world import link_tables
from training.evaluation.importance import ImportanceStudy, UnitImportance
from training.evaluation.predictions import ConfidenceInterval, Predictions, evaluation_path

SPLIT = DaySplit(
    train_first=FIRST, train_last=FIRST, calibration=None, test_first=LAST, test_last=LAST,
    data_until=LAST,
)  # fmt: skip


def rows(lake: Lake, table: str) -> list[dict[str, Any]]:
    return list(pipeline.rows(lake, table))


@pytest.fixture
def run(lake: Lake, tmp_path: Path) -> Lake:
    """A lake with the tables of the shared lake, and no evaluation yet."""
    link_tables(lake, tmp_path)
    return Lake(str(tmp_path), lake.spec)


@pytest.fixture
def predictions(lake: Lake) -> Predictions:
    """Predictions for all impressions that are better than chance."""
    objectives, impressions = tuple(lake.spec.objectives), rows(lake, "impressions")
    values = [[row[f"label_{name}"] for name in objectives] for row in impressions]
    labels = np.array([[value or 0 for value in row] for row in values], np.float32)
    noise = np.random.default_rng(0).uniform(0.02, 0.2, labels.shape)
    return Predictions(
        objectives=objectives,
        impression_ids=np.array([row["impression_id"] for row in impressions], object),
        user_hashes=np.array([crc32(row["user_id"].encode()) for row in impressions]),
        surface=np.array([row["surface"] for row in impressions]),
        probabilities=noise + 0.1 * labels,
        labels=labels,
        label_mask=np.array([[value is not None for value in row] for row in values]),
    )


def worsen(predictions: Predictions, weight: float) -> Predictions:
    """Mix the probabilities with a constant."""
    mixed = (1 - weight) * predictions.probabilities + weight * 0.3
    return replace(predictions, probabilities=mixed)


def test_the_numbers_are_those_of_the_files_of_the_run(
    run: Lake, predictions: Predictions, raw: Path
) -> None:
    predictions.write(evaluation_path(run.root, "gem"), SPLIT)
    worsen(predictions, 0.5).write(evaluation_path(run.root, "lightgbm"), SPLIT)
    page = build_report(run, str(raw), SPLIT).read_text()
    for i, name in enumerate(predictions.objectives):
        is_labelled = predictions.label_mask[:, i]
        y, p = predictions.labels[is_labelled, i], predictions.probabilities[is_labelled, i]
        if 0 < y.sum() < len(y):
            ne = log_loss(y, p) / log_loss(y, np.full(len(y), y.mean()))
            assert f"{name}: GEM has NE {ne:.3f} on {is_labelled.sum():,} rows" in page
    assert "click: GEM has NE" in page
    for reason in {r for row in rows(run, "quarantine") for r in row["reasons"]}:
        count = sum(reason in row["reasons"] for row in rows(run, "quarantine"))
        assert f"<td>{reason}</td><td>{count:,}</td>" in page
    excluded = Counter(row["reason"] for row in rows(run, "excluded_events"))
    for reason, count in excluded.items():
        assert f"{reason} {count:,} (of" in page
    assert excluded
    for who in ("user", "item"):
        missing = sum(row[f"{who}_known_since"] is None for row in rows(run, "examples"))
        assert f"{missing:,} without {who} attributes" in page
    for day in rows(run, "ingest_metrics"):
        counts = [day[name] for name in ("kept", "quarantined", "duplicates", "excluded")]
        assert day["read"] == sum(counts)
        cells = "".join(f"<td>{n:,}</td>" for n in (day["read"], *counts))
        assert f"<td>{day['day']}</td>{cells}</tr>" in page
    assert "student" not in re.sub(r'<p class="note">.*?</p>', "", page, flags=re.DOTALL)
    assert "Gain from distillation" not in page, "no student was evaluated"
    assert "<h2>Studies" not in page, "the lake has none"


def test_the_page_is_one_file(run: Lake, predictions: Predictions, raw: Path) -> None:
    predictions.write(evaluation_path(run.root, "gem"), SPLIT)
    sizes = (("GEM", "0.8"),)
    study = StudyResult(title="Sizes", command="gemline bench", columns=("model", "NE"), rows=sizes)
    study.save(Path(run.root, "studies", "sizes.json"))
    page = build_report(run, str(raw), SPLIT).read_text()
    assert not re.search(r"<(script|link|img|iframe)|@import|url\(\s*['\"]?http", page)
    run_page, _, studies = page.partition("<h2>Studies")
    assert run_page.count("<svg") == 2
    assert "<td>GEM</td><td>0.8</td>" in studies
    assert "Step durations" not in page, "no step is recorded"


def test_the_page_shows_alarms_of_features_and_importances(
    run: Lake, predictions: Predictions, raw: Path
) -> None:
    predictions.write(evaluation_path(run.root, "gem"), SPLIT)
    rng, first = np.random.default_rng(0), LAST - timedelta(days=6)
    days = [rng.integers(1, 5, 800) for _ in range(6)]
    write_statistics(run, first, [*days, np.zeros(800, int), np.zeros(800, int)])
    page = build_report(run, str(raw), SPLIT).read_text()
    _, _, features = page.partition("<h2>Features")
    assert f"1 features and surfaces on {LAST}: 1 with an alarm" in features
    assert "<li>ctx_x (feed): null in 100.0% of rows" in features
    assert "Permutation importance" not in features
    found = UnitImportance(units=("a", "b"), objective="click", increase=2e-4, low=0, high=4e-4)
    ImportanceStudy(gem_day=FIRST, num_rows=1234, importances=[found]).save(run.root)
    page = build_report(run, str(raw), SPLIT).read_text()
    section, _, _ = page.partition("<h2>Features")[2].partition("<h2>")
    assert "a and b" in section and f"the GEM of {FIRST}, on 1,234 impressions" in section


def test_a_report_without_evaluated_models_is_refused(run: Lake, raw: Path) -> None:
    with pytest.raises(UserError, match="no model was evaluated"):
        build_report(run, str(raw), SPLIT)
    assert not (Path(run.root) / "report.html").exists()


def test_predictions_of_other_days_are_refused(
    run: Lake, predictions: Predictions, raw: Path
) -> None:
    predictions.write(
        evaluation_path(run.root, "gem"), SPLIT.model_copy(update={"test_first": FIRST})
    )
    with pytest.raises(UserError, match="predictions of another split of days"):
        build_report(run, str(raw), SPLIT)


def test_predictions_of_other_objectives_are_refused(
    run: Lake, predictions: Predictions, raw: Path
) -> None:
    """An upgrade that adds an objective leaves the evaluations of the spec before it."""
    earlier = replace(
        predictions,
        objectives=predictions.objectives[1:],
        probabilities=predictions.probabilities[:, 1:],
        labels=predictions.labels[:, 1:],
        label_mask=predictions.label_mask[:, 1:],
    )
    predictions.write(evaluation_path(run.root, "gem"), SPLIT)
    path = evaluation_path(run.root, "lightgbm")
    earlier.write(path, SPLIT)
    with pytest.raises(UserError, match="evaluate that model again") as error:
        build_report(run, str(raw), SPLIT)
    assert str(error.value).startswith(f"{path} holds predictions of {earlier.objectives[0]}")


def test_models_are_compared_on_the_surfaces_that_both_were_evaluated_on(
    run: Lake, predictions: Predictions, raw: Path
) -> None:
    """A run that is killed in the second variant of a ranker leaves its first one alone."""
    codes = run.spec.surface_codes
    first, *others = run.spec.ad_surfaces
    by_surface = {s: predictions.filter(predictions.surface == codes[s]) for s in (first, *others)}
    for surface, rows in by_surface.items():
        worsen(rows, 0.5).write(evaluation_path(run.root, f"student-{surface}"), SPLIT)
    by_surface[first].write(evaluation_path(run.root, f"distilled-{first}"), SPLIT)
    page = build_report(run, str(raw), SPLIT).read_text()
    assert "Gain from distillation" in page
    found = load_predictions(run, str(raw), SPLIT)
    comparisons = compare_models(run, found["distilled"], found["student"])
    assert others and {c.surface for c in comparisons} == {"all", first}
    assert comparisons == compare_models(run, by_surface[first], worsen(by_surface[first], 0.5))


@pytest.mark.parametrize(
    "order", [np.arange, lambda size: np.random.default_rng(1).permutation(size)]
)
def test_a_better_model_has_a_negative_difference_in_any_order_of_rows(
    lake: Lake, predictions: Predictions, order: Callable[[int], np.ndarray]
) -> None:
    worse = worsen(predictions, 0.5)
    indices = order(len(worse.impression_ids))
    names = ("impression_ids", "user_hashes", "surface", "probabilities", "labels", "label_mask")
    shuffled = replace(worse, **{name: getattr(worse, name)[indices] for name in names})
    comparisons = compare_models(lake, predictions, shuffled)
    assert {c.surface for c in comparisons} == {"all", *lake.spec.surfaces}
    for comparison in comparisons:
        if comparison.surface == "all":
            assert comparison.logloss_difference + comparison.ci_half_width < 0, comparison
    reverse = compare_models(lake, worse, predictions)
    for comparison, reversed_ in zip(comparisons, reverse, strict=True):
        assert comparison.logloss_difference == pytest.approx(-reversed_.logloss_difference)
    zeros = np.zeros_like(predictions.labels)
    one_class = replace(predictions, labels=zeros), replace(worse, labels=zeros)
    assert not compare_models(lake, *one_class)


def test_the_error_of_a_mean_is_that_of_users_not_of_rows() -> None:
    """Means of drawn users whose rows are all alike vary as much as the error states."""
    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(300), 10)
    draws = [np.repeat(rng.normal(size=300), 10) for _ in range(400)]
    errors = [clustered_standard_error(values, users) for values in draws]
    spread = np.std([values.mean() for values in draws])
    assert np.mean(errors) == pytest.approx(spread, rel=0.1)
    assert clustered_standard_error(draws[0], np.arange(3000)) < 0.4 * spread  # independent rows


BETTER = PromotionRecord(version="v2", promoted=True, reasons=("click: NE -12 [-20, -4]",))
NOISE = PromotionRecord(
    version="v2",
    promoted=False,
    reasons=("click: NE +1 [-5, 8]", "nothing is better outside noise"),
)
REFIT = RefitRecord(version="v3", data_until=1767484800, newest_labels={"click": 1767398400})


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (RankerState("feed", None, None), "no ranker was trained; run `gemline rank train"),
        (RankerState("feed", "v2", "v2", decision=BETTER), "ranker v2 was promoted and is live"),
        (
            RankerState("feed", "v2", "v1", decision=NOISE),
            "ranker v2 was not promoted because nothing is better outside noise; v1 stays live",
        ),
        (
            RankerState("feed", "v2", "v3", decision=NOISE, refit=REFIT),
            "outside noise; v3 stays live, with labels until 2026-01-03 00:00 (click).",
        ),
        (
            RankerState("feed", "v2", None, decision=NOISE),
            "was not promoted because nothing is better outside noise; no ranker is live",
        ),
        (
            RankerState("feed", "v2", "v3", decision=BETTER, refit=REFIT),
            "ranker v2 was promoted, and its refit v3 is live, with labels until 2026-01-03 00:00",
        ),
        (
            RankerState("feed", "v2", "v3", decision=BETTER),  # a later refit was rolled back
            "ranker v2 was promoted; v3 is live.",
        ),
        (
            RankerState("feed", "v2", "v1", is_blocked=True, decision=BETTER),
            "ranker v2 was rolled back; v1 stays live. Train a new one",
        ),
        (
            RankerState("feed", "v3", "v1", decision=NOISE),
            "ranker v3 was not evaluated for promotion; v1 stays live. Run `gemline rank promote",
        ),
    ],
)
def test_the_lead_shows_whether_a_ranker_was_promoted_and_why(
    state: RankerState, text: str
) -> None:
    (step,) = next_steps([state], [])
    assert step.text.startswith("feed: ")
    assert text in step.text
    has_details = state.decision is not None and "not evaluated" not in text
    if has_details and not state.is_blocked:
        assert state.decision
        assert step.details == "; ".join(state.decision.reasons)


def test_the_lead_names_objectives_with_too_few_positives_and_calibration_that_is_off() -> None:
    checks = [
        CalibrationCheck("feed", "click", 500, ConfidenceInterval(1.01, 0.95, 1.07)),
        CalibrationCheck("feed", "conversion", 3, None),
        CalibrationCheck("reels", "click", 400, ConfidenceInterval(1.30, 1.15, 1.42)),
        CalibrationCheck("reels", "long_view", 90, ConfidenceInterval(0.80, 0.70, 0.91)),
    ]
    too_few, off = next_steps([], checks)
    assert "Too few positives to judge: conversion on feed (3)." in too_few.text
    assert "click on reels 1.30 [1.15, 1.42], long_view on reels 0.80 [0.70, 0.91]" in off.text
    assert "feed" not in off.text and "Train these rankers again" in off.text
    refit = RankerState("reels", "v2", "v3", decision=BETTER, refit=REFIT)
    *_, refreshed = next_steps([refit], checks)
    assert "click on reels 1.30" in refreshed.text
    assert "Their refits have refreshed it" in refreshed.text
    (fine,) = next_steps([], checks[:1])
    assert fine.text.startswith("All objectives are calibrated")


def test_calibration_is_checked_by_surface_and_objective(
    lake: Lake, predictions: Predictions
) -> None:
    shifted = replace(predictions, probabilities=np.minimum(3 * predictions.probabilities, 1))
    checks = {(c.surface, c.objective): c for c in calibration_checks(lake, shifted)}
    column = predictions.objectives.index("click")
    for surface in lake.spec.ad_surfaces:
        is_row = predictions.surface == lake.spec.surface_codes[surface]
        is_row &= predictions.label_mask[:, column]
        check = checks[surface, "click"]
        assert check.positives == predictions.labels[is_row, column].sum()
        if check.calibration:
            expected = shifted.probabilities[is_row, column].sum() / check.positives
            assert check.calibration.value == pytest.approx(expected)
            assert check.is_off == (not check.calibration.low <= 1 <= check.calibration.high)
    assert any(check.is_off for check in checks.values())
    assert all(surface in lake.spec.surfaces_of(name) for surface, name in checks)


def test_the_promotion_state_is_read_from_the_lake_and_shown_on_the_page(
    run: Lake, predictions: Predictions, raw: Path
) -> None:
    live_pointer(run.root, "feed").promote("v1")
    latest_trained_pointer(run.root, "feed").promote("v2")
    write_promotion_record(run.root, "feed", NOISE)
    feed, *others = ranker_states(run)
    assert feed == RankerState("feed", "v2", "v1", is_blocked=False, decision=NOISE)
    assert all(state.trained is None and state.live is None for state in others)
    predictions.write(evaluation_path(run.root, "gem"), SPLIT)
    lead = build_report(run, str(raw), SPLIT).read_text().partition("<h2>")[0]
    assert "feed: ranker v2 was not promoted because nothing is better outside noise" in lead
    for state in others:
        assert f"{state.surface}: no ranker was trained" in lead
    live_pointer(run.root, "feed").promote("v2")
    live_pointer(run.root, "feed").rollback()
    assert ranker_states(run)[0].is_blocked
