"""Scores against scikit-learn's, on any predictions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from training.loop.metrics import mean_auc, score


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(3, 300))
def test_scores_are_those_of_scikit_learn(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    p = rng.uniform(0.01, 0.99, (n, 2)).round(2)
    labels = (rng.uniform(size=(n, 2)) < p).astype(np.float32)
    known, surface = rng.uniform(size=(n, 2)) < 0.8, rng.integers(1, 3, n)
    found = score(p, labels, known, surface, ("feed", "reels"), ("click", "like"))
    assert len({(s.surface, s.objective) for s in found}) == len(found)
    for s in found:
        column = ("click", "like").index(s.objective)
        here = known[:, column] & (
            (surface == ("feed", "reels").index(s.surface) + 1) if s.surface != "all" else True
        )
        y, said = labels[here, column], p[here, column]
        assert (s.rows, s.positives) == (len(y), y.sum())
        assert s.logloss == pytest.approx(log_loss(y, said, labels=[0, 1]))
        if 0 < y.sum() < len(y):
            assert s.auc == pytest.approx(roc_auc_score(y, said))
            assert s.ne == pytest.approx(log_loss(y, said) / log_loss(y, np.full(len(y), y.mean())))
            assert s.calibration == pytest.approx(said.sum() / y.sum())
        else:
            assert np.isnan([s.auc, s.ne, s.calibration]).all()


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(1, 200), st.integers(1, 9))
def test_auc_within_groups_is_the_mean_of_each(seed: int, n: int, groups: int) -> None:
    rng = np.random.default_rng(seed)
    group, labels = rng.integers(0, groups, n) * 7, rng.integers(0, 2, n).astype(float)
    p = rng.uniform(size=n).round(1)  # many are equal
    cuts = [(labels[group == g], p[group == g]) for g in np.unique(group)]
    each = [roc_auc_score(y, said) for y, said in cuts if 0 < y.sum() < len(y)]
    found = mean_auc(group, labels, p)
    assert found == pytest.approx(np.mean(each)) if each else np.isnan(found)
