"""Replay: how likely other orders were, and that what is estimated is what would have been."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit, logit
from sklearn.metrics import ndcg_score

from etl.errors import UserError
from etl.sources.simulator.outcomes import CLICK_POSITION, LONG_POSITION
from etl.tables.lake import Lake
from ranking.package.ranker import load
from ranking.replay.estimate import estimate
from ranking.replay.logged import logged
from ranking.replay.ndcg import ndcg
from ranking.replay.places import place_probabilities, shares
from ranking.replay.scored import Scored, positional, scored
from ranking.report.facts import true_probabilities
from tests.conftest import FIRST, LAST

PARTS = 8
WIDEST = {"click": 2.0, "long_view": 1.5}  # an interval's width over the truth
WEIGHTS = st.lists(st.floats(0.05, 1), min_size=1, max_size=4)


def drawn(weights: np.ndarray, order: tuple[int, ...], total: float) -> tuple[np.ndarray, float]:
    """Propensities of the slots of an order, and its chance."""
    left, found = total, []
    for ad in order:
        found.append(weights[ad] / left)
        left -= weights[ad]
    return np.array(found), float(np.prod(found))


@given(WEIGHTS, st.floats(0, 2))
def test_places_are_as_likely_as_all_orders_say(weights: list[float], others: float) -> None:
    w = np.array(weights)
    total = w.sum() + others
    orders = list(permutations(range(len(w))))
    chances = np.array([drawn(w, order, total)[1] for order in orders])
    chances /= chances.sum()
    wanted = np.zeros((len(w), len(w)))
    for order, chance in zip(orders, chances, strict=True):
        wanted[order, np.arange(len(w))] += chance
    for order in orders:
        slots, _ = drawn(w, order, total)
        np.testing.assert_allclose(shares(slots[None])[0], w[list(order)] / total)
        found = place_probabilities(slots[None])[0]
        np.testing.assert_allclose(found, wanted[list(order)], atol=1e-9)
        np.testing.assert_allclose(found.sum(0), 1)


@given(WEIGHTS, st.integers(0, 10**6))
def test_the_estimate_is_the_value_of_the_other_order_in_the_mean(
    weights: list[float], seed: int
) -> None:
    """Over all orders that could have been logged, each as likely as it was."""
    w, rng = np.array(weights), np.random.default_rng(seed)
    size = len(w)
    worth, target = rng.uniform(size=(size, size)), rng.permutation(size)
    mean, total = 0.0, w.sum() + 1
    orders = list(permutations(range(size)))
    chances = np.array([drawn(w, order, total)[1] for order in orders])
    for order, chance in zip(orders, chances / chances.sum(), strict=True):
        ads, places = np.array(order), np.arange(size)
        likely = np.diagonal(place_probabilities(drawn(w, order, total)[0][None])[0])
        gains, one = worth[ads, places], np.zeros(size, np.int64)
        same = (target[ads] == places) / likely
        mean += chance * float((gains * same).sum())
        if size > 1:
            two = np.concatenate((one, one + 1))
            twice = [np.tile(x, 2) for x in (gains, places, target[ads], likely)]
            found = estimate(*twice, two, two).other.value
            assert found == pytest.approx(float((gains * same).sum()))
    assert mean == pytest.approx(worth[np.arange(size), target].sum())


@given(st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=5), min_size=1, max_size=5))
def test_ndcg_is_that_of_scikit_learn(requests: list[list[int]]) -> None:
    rng = np.random.default_rng(len(requests))
    gains = np.concatenate(requests).astype(float)
    owner = np.repeat(np.arange(len(requests)), [len(r) for r in requests])
    places = np.concatenate([rng.permutation(len(r)) for r in requests])
    wanted = [
        ndcg_score([gains[owner == n]], [-places[owner == n]])
        for n in range(len(requests))
        if gains[owner == n].any()
    ]
    found = ndcg(gains, places, owner)
    assert np.isnan(found) if not wanted else found == pytest.approx(np.mean(wanted))


@pytest.fixture(scope="module")
def said(lake: Lake, folder) -> Scored:
    return scored(lake, load(folder), (FIRST, LAST), LAST)


def test_the_truth_lies_in_the_interval_of_the_estimate(lake: Lake, said: Scored, raw) -> None:
    """The simulator knows what each ad would have brought in each place."""
    found = logged(lake, (FIRST, LAST), said)
    rows = found.scored
    moved = (found.other - found.places).astype(float)
    assert (moved != 0).mean() > 0.3
    for name, slope in (("click", CLICK_POSITION[0]), ("long_view", LONG_POSITION)):
        column = list(lake.spec.objectives).index(name)
        true = true_at_place(lake, rows, str(raw), name, slope * moved)
        gains = rows.labels[:, column]
        told = estimate(gains, found.places, found.other, found.chances, rows.request, rows.user)
        truth = true.sum() / len(np.unique(rows.request))
        assert told.other.low < truth < told.other.high, (name, truth, told.other)
        assert told.other.high - told.other.low < WIDEST[name] * truth, "it says something"
        held = 0
        for part in range(PARTS):  # users are independent: so many logs of their own
            own = rows.user % PARTS == part
            columns = (found.places, found.other, found.chances, rows.request, rows.user)
            of_part = estimate(gains[own], *(column[own] for column in columns)).other
            truth = true[own].sum() / len(np.unique(rows.request[own]))
            held += of_part.low < truth < of_part.high
        assert held >= PARTS - 2, f"{name}: {held} of {PARTS} intervals of 95 % hold the truth"


def true_at_place(lake: Lake, rows: Scored, raw: str, name: str, shift: np.ndarray) -> np.ndarray:
    from training.predictions import Predictions

    n = len(rows.impressions)
    known = np.ones((n, len(lake.spec.objectives)), bool)
    asked = Predictions(tuple(lake.spec.objectives), rows.impressions, rows.user, rows.user * 0,
                        rows.labels, rows.labels.astype(np.float32), known)  # fmt: skip
    truth = true_probabilities(asked, raw)
    assert truth is not None and len(truth.impressions) == n
    return expit(logit(truth.probability[:, asked.objectives.index(name)]) + shift)


def test_the_place_in_the_log_does_not_move_the_order(lake: Lake, said: Scored) -> None:
    from features.inputs import features_of

    names = features_of(lake.spec).row_numbers
    assert [names[n] for n in positional(lake.spec, names)] == ["x_position"]


def test_requests_with_gaps_are_left_out_and_none_left_is_told(lake: Lake, said: Scored) -> None:
    everything = logged(lake, (FIRST, LAST), said)
    gone = said.impressions == everything.scored.impressions[0]
    less = logged(lake, (FIRST, LAST), said.at(~gone))
    alone = (everything.scored.request == everything.scored.request[0]).sum() == 1
    assert less.left_out == everything.left_out + (0 if alone else 1)
    with pytest.raises(UserError, match="no request has all its slots"):
        logged(lake, (FIRST, LAST), said._replace(final=said.final & False))
