"""Paired intervals of AUC over users: against scikit-learn, on ties, and by resampled users."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from training.evaluation.auc_intervals import RankedRows, paired_auc_difference
from training.evaluation.predictions import Predictions, concat_predictions


def predictions(seed: int, noise: float, users: int = 40, n: int = 1200) -> Predictions:
    """Labels and predictions of their rates with noise; the labels depend on `seed` alone."""
    rng = np.random.default_rng(seed)
    user, signal = rng.integers(0, users, n), rng.normal(size=n)
    labels = (signal + rng.normal(size=n) > 1).astype(np.float32)
    predicted = 1 / (1 + np.exp(-signal - noise * rng.normal(size=n)))
    return Predictions(
        ("click",), np.arange(n).astype(str).astype(object), user, np.ones(n, np.int64),
        predicted[:, None], labels[:, None], np.ones((n, 1), bool),
    )  # fmt: skip


@given(st.integers(0, 2**16), st.integers(1, 6), st.integers(1, 5))
def test_a_weighted_auc_is_that_of_repeated_rows(seed: int, levels: int, users: int) -> None:
    rng = np.random.default_rng(seed)
    user, labels = rng.integers(0, users, 30), rng.integers(0, 2, 30).astype(np.float32)
    predicted = rng.integers(0, levels, 30) / levels  # many ties
    weights = rng.integers(0, 4, (users, 3)).astype(np.float64)
    aucs = RankedRows.of(predicted, labels, user).auc(weights)
    for draw, auc in zip(weights.T, aucs, strict=True):
        rows = np.repeat(np.arange(30), draw[user].astype(int))
        if len(np.unique(labels[rows])) < 2:
            assert np.isnan(auc)
        else:
            assert auc == pytest.approx(roc_auc_score(labels[rows], predicted[rows]))


def test_a_difference_is_that_of_mean_aucs_and_within_its_interval() -> None:
    good, better, bad = (predictions(0, noise) for noise in (0.5, 0.2, 3.0))

    def auc(p: Predictions) -> float:
        return float(roc_auc_score(p.labels[:, 0], p.probabilities[:, 0]))

    difference = paired_auc_difference([good, better], [bad], "click")
    assert difference.value == pytest.approx((auc(good) + auc(better)) / 2 - auc(bad))
    assert 0 < difference.low < difference.value < difference.high
    none = paired_auc_difference([good, bad], [bad, good], "click")
    assert none.value == none.low == none.high == 0


def test_pairing_makes_the_interval_narrower_than_that_of_unrelated_rows() -> None:
    """Two models of the same rows have common noise, which cancels."""
    good = predictions(0, 0.5)
    similar = replace(good, probabilities=good.probabilities**1.2 + 0.01 * good.surface[:, None])
    paired = paired_auc_difference([good], [similar], "click")
    unpaired = paired_auc_difference([good], [replace(good, probabilities=0 * good.probabilities)],
                                   "click")  # fmt: skip
    assert paired.high - paired.low < 0.1 * (unpaired.high - unpaired.low)


def test_users_are_resampled_with_all_rows_over_all_pooled_days() -> None:
    """A second day of the same users does not narrow the interval; one of other users does."""
    good, bad = predictions(1, 0.5), predictions(1, 3.0)

    def width(user_shift: int) -> float:
        days = [
            concat_predictions([p, replace(p, user_hashes=p.user_hashes + user_shift)])
            for p in (good, bad)
        ]
        interval = paired_auc_difference([days[0]], [days[1]], "click")
        return interval.high - interval.low

    once = paired_auc_difference([good], [bad], "click")
    assert width(0) == pytest.approx(once.high - once.low, rel=1e-6)
    assert width(10_000) < 0.85 * width(0)
