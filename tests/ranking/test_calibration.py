"""Calibration keeps the order of scores, and makes their sums those of the labels."""

import shutil
from datetime import date
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.spec import DataSpec
from etl.tables.atomic_io import local_path
from etl.tables.lake import Lake
from ranking.registry.manifest import MANIFEST
from ranking.registry.ranker import rankers_folder
from ranking.scoring.calibration import (
    PlattScaling,
    fit_platt,
    logit,
    sigmoid,
)
from ranking.trainer.calibrate import load_earlier_calibrations, pool_calibrations


def draw_labels(p: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return (rng.uniform(size=len(p)) < p).astype(np.float32)


def test_the_prior_is_the_mean_of_the_surfaces() -> None:
    """The mean slope is geometric, as slopes are ratios."""
    surfaces: list[dict[str, PlattScaling]] = [
        {
            "click": PlattScaling(slope=0.5, intercept=-1.0),
            "like": PlattScaling(slope=3.0, intercept=0.0),
        },
        {"click": PlattScaling(slope=2.0, intercept=2.0)},
    ]
    for order in (surfaces, surfaces[::-1]):
        prior = pool_calibrations(order)
        assert prior["click"].slope == pytest.approx(1) and prior["click"].intercept == 0.5
        assert prior["like"].slope == pytest.approx(3) and prior["like"].intercept == 0


@settings(max_examples=30)
@given(st.floats(0.3, 3), st.floats(-1.5, 1.5), st.integers(0, 50))
def test_platt_scaling_recovers_an_affine_distortion(a: float, b: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    p = rng.uniform(0.05, 0.6, 20_000)
    labels = draw_labels(p, rng)
    distorted = (logit(p) - b) / a
    fitted = fit_platt(distorted, labels)
    assert abs(fitted(distorted).sum() / labels.sum() - 1) < 0.01


@settings(max_examples=20)
@given(st.integers(0, 50))
def test_calibrated_sums_are_those_of_labels_and_the_order_is_kept(seed: int) -> None:
    rng = np.random.default_rng(seed)
    p = rng.beta(1, 6, 20_000)
    labels, distorted = draw_labels(p, rng), np.tanh(logit(p)) * 4
    calibrated = fit_platt(distorted, labels)(distorted)
    assert abs(calibrated.sum() / labels.sum() - 1) < 0.01
    order = np.argsort(distorted)
    assert (np.diff(calibrated[order]) >= 0).all()
    is_distinct = np.diff(distorted[order]) > 1e-9
    assert (np.diff(calibrated[order])[is_distinct] > 0).all()


def test_without_positives_or_with_a_negative_slope_the_prior_is_returned() -> None:
    x, prior = np.linspace(-4, 4, 1000), PlattScaling(slope=0.9, intercept=0.3)
    assert fit_platt(x, np.zeros(1000, np.float32)) == PlattScaling()
    assert fit_platt(x, np.zeros(1000, np.float32), prior) == prior
    assert fit_platt(x, (x < 0).astype(np.float32), prior) == prior


def test_few_positives_move_the_prior_a_little_and_many_override_it() -> None:
    rng, size = np.random.default_rng(1), 800
    x = rng.normal(-6, 1, 100 * size)
    labels = draw_labels(sigmoid(x), rng)
    wrong = PlattScaling(slope=1.0, intercept=-0.7)
    all_rows = fit_platt(x, labels, wrong)
    assert abs(np.log(all_rows(x).sum() / labels.sum())) < 0.05, "many positives override it"
    shrunk, alone = [], []
    for first in range(0, len(x), size):
        block = slice(first, first + size)
        shrunk.append(fit_platt(x[block], labels[block])(x).sum() / sigmoid(x).sum())
        alone.append(max(labels[block].sum(), 0.5) / sigmoid(x[block]).sum())
    assert 1 < labels.sum() / 100 < 10, "a few positives in each block"
    assert (np.log(shrunk) ** 2).mean() < 0.5 * (np.log(alone) ** 2).mean()


@given(st.floats(-700, 700))
def test_no_logit_overflows(x: float) -> None:
    assert 0 <= sigmoid(np.array([x]))[0] <= 1
    assert sigmoid(np.array([x]))[0] == pytest.approx(1 - sigmoid(np.array([-x]))[0], abs=1e-12)


def test_the_prior_has_no_calibrations_of_objectives_that_a_surface_lacks(
    lake_spec: DataSpec, folder: Path, tmp_path: Path
) -> None:
    """They were never fitted, and would pull the mean of all surfaces to the identity."""
    objectives = dict(lake_spec.objectives)
    objectives["conversion"] = objectives["conversion"].model_copy(update={"surfaces": ("reels",)})
    lake = Lake(str(tmp_path), lake_spec.model_copy(update={"objectives": objectives}))
    shutil.copytree(folder, local_path(rankers_folder(lake.root, "feed") / "20260101-s0"))
    (prior,) = load_earlier_calibrations(lake, date(2026, 1, 2))
    assert set(prior) == set(lake_spec.objectives) - {"conversion"}


def test_a_damaged_earlier_ranker_is_skipped_in_the_prior(
    lake_spec: DataSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lake = Lake(str(tmp_path), lake_spec)
    folder = rankers_folder(lake.root, "feed") / "20260101-s0-damaged"
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text("")
    assert load_earlier_calibrations(lake, date(2026, 1, 2)) == []
    assert "skipped in the prior" in caplog.text
    assert pool_calibrations([]) == {}
