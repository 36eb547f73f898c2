"""Metrics equal those of scikit-learn, on any predictions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from training.evaluation.metrics import mean_group_auc, slice_metrics


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(3, 300))
def test_slice_metrics_equal_those_of_scikit_learn(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    p = rng.uniform(0.01, 0.99, (n, 2)).round(2)
    labels = (rng.uniform(size=(n, 2)) < p).astype(np.float32)
    mask, surface = rng.uniform(size=(n, 2)) < 0.8, rng.integers(1, 3, n)
    metrics = slice_metrics(p, labels, mask, surface, ("feed", "reels"), ("click", "like"))
    assert len({(s.surface, s.objective) for s in metrics}) == len(metrics)
    for s in metrics:
        column = ("click", "like").index(s.objective)
        rows = mask[:, column].copy()
        if s.surface != "all":
            rows &= surface == ("feed", "reels").index(s.surface) + 1
        y, predicted = labels[rows, column], p[rows, column]
        assert (s.rows, s.positives) == (len(y), y.sum())
        logloss = log_loss(y, predicted, labels=[0, 1])
        assert s.logloss == pytest.approx(logloss)
        if 0 < y.sum() < len(y):
            assert s.auc == pytest.approx(roc_auc_score(y, predicted))
            assert s.ne == pytest.approx(logloss / log_loss(y, np.full(len(y), y.mean())))
            assert s.calibration == pytest.approx(predicted.sum() / y.sum())
        else:
            assert np.isnan([s.auc, s.ne, s.calibration]).all()


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(1, 200), st.integers(1, 9))
def test_group_auc_is_the_mean_of_the_groups(seed: int, n: int, groups: int) -> None:
    rng = np.random.default_rng(seed)
    group, labels = rng.integers(0, groups, n) * 7, rng.integers(0, 2, n).astype(float)
    p = rng.uniform(size=n).round(1)  # with many ties
    by_group = [(labels[group == g], p[group == g]) for g in np.unique(group)]
    auc = [roc_auc_score(y, predicted) for y, predicted in by_group if 0 < y.sum() < len(y)]
    mean = mean_group_auc(group, labels, p)
    assert mean == pytest.approx(np.mean(auc)) if auc else np.isnan(mean)
