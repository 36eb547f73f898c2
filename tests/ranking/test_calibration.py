"""Calibration keeps the order, and makes probabilities those of what happens."""

from datetime import date
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.spec import DataSpec
from etl.tables.lake import Lake
from ranking.calibration import Isotonic, Kind, Platt, fit, fit_platt, logit, sigmoid
from ranking.package.manifest import MANIFEST
from ranking.package.versions import versions
from ranking.train import earlier_calibrations, pooled


def labels_of(p: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return (rng.uniform(size=len(p)) < p).astype(np.float32)


def test_the_prior_is_the_mean_of_the_surfaces() -> None:
    """A slope is a ratio, so its mean is the geometric one; isotonic fits have no part in it."""
    steps = Isotonic(given=(0.0, 1.0), wanted=(0.1, 0.9))
    surfaces: list[dict[str, Platt | Isotonic]] = [
        {"click": Platt(slope=0.5, intercept=-1.0), "like": Platt(slope=3.0, intercept=0.0)},
        {"click": Platt(slope=2.0, intercept=2.0), "like": steps},
    ]
    for order in (surfaces, surfaces[::-1]):
        prior = pooled(order)
        assert prior["click"].slope == pytest.approx(1) and prior["click"].intercept == 0.5
        assert prior["like"].slope == pytest.approx(3) and prior["like"].intercept == 0


@settings(max_examples=30)
@given(st.floats(0.3, 3), st.floats(-1.5, 1.5), st.integers(0, 50))
def test_platt_recovers_a_distortion(a: float, b: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    p = rng.uniform(0.05, 0.6, 20_000)
    labels = labels_of(p, rng)
    distorted = (logit(p) - b) / a
    fitted = fit_platt(distorted, labels)
    assert abs(fitted(distorted).sum() / labels.sum() - 1) < 0.01


@settings(max_examples=20)
@given(st.sampled_from(["platt", "isotonic"]), st.integers(0, 50))
def test_calibrated_sums_are_those_of_labels_and_the_order_stays(kind: Kind, seed: int) -> None:
    rng = np.random.default_rng(seed)
    p = rng.beta(1, 6, 20_000)
    labels, bent = labels_of(p, rng), np.tanh(logit(p)) * 4
    fitted = fit(bent, labels, kind)
    found = fitted(bent)
    assert abs(found.sum() / labels.sum() - 1) < (0.01 if kind == "platt" else 0.05)
    order = np.argsort(bent)
    assert (np.diff(found[order]) >= 0).all()
    distinct = np.diff(bent[order]) > 1e-9
    assert (np.diff(found[order])[distinct] > 0).all()


def test_isotonic_follows_what_no_slope_can() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(-4, 4, 60_000)
    p = 0.1 + 0.5 * (x > 0)
    labels = labels_of(p, rng)

    def loss(fitted: Platt | Isotonic) -> float:
        said = fitted(x)
        return float(-np.log(np.where(labels > 0, said, 1 - said)).mean())

    assert loss(fit(x, labels, "isotonic")) < loss(fit(x, labels, "platt")) - 0.01


def test_no_outcome_or_a_turned_order_leave_the_prior() -> None:
    x, prior = np.linspace(-4, 4, 1000), Platt(slope=0.9, intercept=0.3)
    assert fit(x, np.zeros(1000, np.float32)) == Platt()
    assert fit(x, np.zeros(1000, np.float32), prior=prior) == prior
    assert fit_platt(x, (x < 0).astype(np.float32), prior) == prior


def test_few_outcomes_move_the_prior_a_little_and_many_overrule_it() -> None:
    rng, size = np.random.default_rng(1), 800
    x = rng.normal(-6, 1, 100 * size)
    labels = labels_of(sigmoid(x), rng)
    wrong = Platt(slope=1.0, intercept=-0.7)
    all_rows = fit_platt(x, labels, wrong)
    assert abs(np.log(all_rows(x).sum() / labels.sum())) < 0.05, "many outcomes overrule it"
    shrunk, alone = [], []
    for first in range(0, len(x), size):
        block = slice(first, first + size)
        shrunk.append(fit_platt(x[block], labels[block])(x).sum() / sigmoid(x).sum())
        alone.append(max(labels[block].sum(), 0.5) / sigmoid(x[block]).sum())
    assert 1 < labels.sum() / 100 < 10, "a few outcomes in each block"
    assert (np.log(shrunk) ** 2).mean() < 0.5 * (np.log(alone) ** 2).mean()


@given(st.floats(-700, 700))
def test_no_logit_overflows(x: float) -> None:
    assert 0 <= sigmoid(np.array([x]))[0] <= 1
    assert sigmoid(np.array([x]))[0] == pytest.approx(1 - sigmoid(np.array([-x]))[0], abs=1e-12)


def test_a_damaged_earlier_ranker_is_left_out_of_the_prior(
    lake_spec: DataSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lake = Lake(str(tmp_path), lake_spec)
    folder = versions(lake.root, "feed") / "20260101-s0-damaged"
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text("")
    assert earlier_calibrations(lake, date(2026, 1, 2)) == []
    assert "left out of the prior" in caplog.text
    assert pooled([]) == {}
