"""Statistics of values: no row reads its own label, and other rows read all training rows."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.public.fit import Ensemble
from benchmarks.public.tabular_models import TabularModel
from benchmarks.public.target_statistics import PRIOR_COUNT, TargetStatistics

SIZES = (4, 3)


def statistics(seed: int, rows: int = 60) -> TargetStatistics:
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.integers(0, size, rows) for size in SIZES], 1)
    return TargetStatistics.of(SIZES, ids, rng.integers(0, 2, rows) * 1.0, seed)


@given(st.integers(0, 2**16), st.integers(0, 58))
def test_no_training_row_reads_the_labels_of_its_fold(seed: int, row: int) -> None:
    """Exchanging two labels of a fold, which keeps the rate of all rows, changes no row of it."""
    before = statistics(seed)
    fold = before.folds == before.folds[row]
    labels = before.labels.copy()
    labels[fold] = np.roll(labels[fold], 1)
    after = TargetStatistics(SIZES, before.ids, labels, before.folds)
    np.testing.assert_array_equal(before.of_training_rows()[fold], after.of_training_rows()[fold])


@given(st.integers(0, 2**16))
def test_other_rows_read_counts_and_rates_of_all_training_rows(seed: int) -> None:
    """By field and by pair of fields; a value that is not in training has the rate of all rows."""
    train = statistics(seed, 12)
    ids = np.array([[a, b] for a in range(SIZES[0]) for b in range(SIZES[1])])
    prior = (train.labels.sum() + 0.5) / (len(train.labels) + 1)
    for row, columns in zip(ids, train(ids), strict=True):
        same = train.ids == row
        for key, equal in enumerate((same[:, 0], same[:, 1], same.all(1))):
            rate = (train.labels[equal].sum() + PRIOR_COUNT * prior) / (equal.sum() + PRIOR_COUNT)
            expected = np.log1p(equal.sum()), np.log(rate / (1 - rate))
            np.testing.assert_allclose(columns[2 * key : 2 * key + 2], expected, rtol=1e-5)


def test_members_are_trained_on_their_own_losses_and_predict_their_mean() -> None:
    torch.manual_seed(0)
    ensemble = Ensemble(lambda: TabularModel([4, 3]), 2).eval()
    inputs = torch.randint(0, 3, (8, 2)), torch.empty(8, 0)
    labels = torch.randint(0, 2, (8,)).float()
    members = [m for m in ensemble.members if isinstance(m, TabularModel)]
    mean = torch.stack([member(*inputs) for member in members]).mean(0)
    torch.testing.assert_close(ensemble(*inputs), mean)
    ensemble.loss(inputs, labels).backward()
    together = [p.grad for p in members[0].parameters()]
    ensemble.zero_grad(set_to_none=True)
    members[0].loss(inputs, labels).backward()
    for gradient, parameter in zip(together, members[0].parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)
