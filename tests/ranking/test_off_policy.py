"""Off-policy evaluation: propensities of positions, and estimates against the true value."""

from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit, logit
from sklearn.metrics import ndcg_score

from etl.errors import UserError
from etl.simulator.ads import CLICK_POSITION, LONG_VIEW_POSITION
from etl.tables.arrow import Snapshot
from etl.tables.lake import Lake
from ranking.off_policy.estimators import (
    RankingPair,
    estimate_policy_value,
    first_slot_shares,
    ndcg,
    position_propensities,
)
from ranking.off_policy.evaluation import (
    ScoredAds,
    load_logged_rankings,
    score_logged_ads,
)
from ranking.registry.ranker import load_ranker
from ranking.report.data import true_probabilities
from tests.conftest import FIRST, LAST

NUM_PARTS = 8
MAX_RELATIVE_WIDTH = {"click": 2.0, "long_view": 1.5}  # interval width over the true value
WEIGHTS = st.lists(st.floats(0.05, 1), min_size=1, max_size=4)


def plackett_luce(
    weights: np.ndarray, order: tuple[int, ...], total: float
) -> tuple[np.ndarray, float]:
    """The propensities of the slots of an order, and the probability of the order."""
    remaining, propensities = total, []
    for ad in order:
        propensities.append(weights[ad] / remaining)
        remaining -= weights[ad]
    return np.array(propensities), float(np.prod(propensities))


@given(WEIGHTS, st.floats(0, 2))
def test_position_propensities_are_sums_over_all_orders(
    weights: list[float], others: float
) -> None:
    w = np.array(weights)
    total = w.sum() + others
    orders = list(permutations(range(len(w))))
    probabilities = np.array([plackett_luce(w, order, total)[1] for order in orders])
    probabilities /= probabilities.sum()
    expected = np.zeros((len(w), len(w)))
    for order, probability in zip(orders, probabilities, strict=True):
        expected[order, np.arange(len(w))] += probability
    for order in orders:
        slots, _ = plackett_luce(w, order, total)
        np.testing.assert_allclose(first_slot_shares(slots[None])[0], w[list(order)] / total)
        propensities = position_propensities(slots[None])[0]
        np.testing.assert_allclose(propensities, expected[list(order)], atol=1e-9)
        np.testing.assert_allclose(propensities.sum(0), 1)


def test_an_ad_that_had_to_be_drawn_for_its_slot_stays_there_in_all_orders() -> None:
    """Such as a pinned one; the others are drawn by their propensities."""
    slots = np.array([[1.0, 0.5, 1.0], [0.5, 1.0, 1.0], [1.0, 1.0, 0.3]])
    first_is_pinned, second_had_no_rival, both_are_pinned = position_propensities(slots)
    last_two = np.array([[1, 0, 0], [0, 0.5, 0.5], [0, 0.5, 0.5]])
    np.testing.assert_allclose(first_is_pinned, last_two, atol=1e-5)
    np.testing.assert_allclose(second_had_no_rival, last_two[::-1, ::-1], atol=1e-5)
    np.testing.assert_allclose(both_are_pinned, np.eye(3), atol=1e-5)


def test_the_rewards_of_one_user_have_no_interval() -> None:
    ads = np.arange(2)
    rankings = RankingPair(ads, ads, np.full(2, 0.5), np.zeros(2, np.int64), np.zeros(2, np.int64))
    estimate = estimate_policy_value(np.array([1.0, 2.0]), rankings)
    assert (estimate.logged.value, estimate.ips.value) == (3, 6)
    assert np.isnan([estimate.ips.low, estimate.difference.high]).all()


@given(WEIGHTS, st.integers(0, 10**6))
def test_the_estimate_is_unbiased(weights: list[float], seed: int) -> None:
    """Its mean over all orders that could have been logged, weighted by their probabilities."""
    w, rng = np.array(weights), np.random.default_rng(seed)
    size = len(w)
    reward_at, target = rng.uniform(size=(size, size)), rng.permutation(size)  # (ad, position)
    mean, total = 0.0, w.sum() + 1
    orders = list(permutations(range(size)))
    probabilities = np.array([plackett_luce(w, order, total)[1] for order in orders])
    probabilities /= probabilities.sum()
    for order, probability in zip(orders, probabilities, strict=True):
        ads, positions = np.array(order), np.arange(size)
        slots = plackett_luce(w, order, total)[0]
        propensities = np.diagonal(position_propensities(slots[None])[0])
        rewards = reward_at[ads, positions]
        weighted = float((rewards * (target[ads] == positions) / propensities).sum())
        mean += probability * weighted
        if size > 1:
            request_ids = np.repeat([0, 1], size)  # the same request of two users
            rankings = RankingPair(
                logged_ranks=np.tile(positions, 2),
                target_ranks=np.tile(target[ads], 2),
                propensities=np.tile(propensities, 2),
                request_ids=request_ids,
                user_ids=request_ids,
            )
            estimate = estimate_policy_value(np.tile(rewards, 2), rankings).ips.value
            assert estimate == pytest.approx(weighted)
    assert mean == pytest.approx(reward_at[np.arange(size), target].sum())


@given(st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=5), min_size=1, max_size=5))
def test_ndcg_equals_that_of_scikit_learn(requests: list[list[int]]) -> None:
    rng = np.random.default_rng(len(requests))
    rewards = np.concatenate(requests).astype(float)
    request_ids = np.repeat(np.arange(len(requests)), [len(labels) for labels in requests])
    ranks = np.concatenate([rng.permutation(len(labels)) for labels in requests])
    expected = []
    for request_id in range(len(requests)):
        rows = request_ids == request_id
        if rewards[rows].any():
            expected.append(ndcg_score([rewards[rows]], [-ranks[rows]]))
    value = ndcg(rewards, ranks, request_ids)
    if expected:
        assert value == pytest.approx(np.mean(expected))
    else:
        assert np.isnan(value)


@pytest.fixture(scope="module")
def scored_ads(lake: Lake, folder: Path) -> ScoredAds:
    return score_logged_ads(lake, load_ranker(folder), (FIRST, LAST), LAST)


def test_the_true_value_is_inside_the_interval_of_the_estimate(
    lake: Lake, scored_ads: ScoredAds, raw: Path
) -> None:
    """The simulator knows the probability of a reward of each ad at each position."""
    logged = load_logged_rankings(lake, (FIRST, LAST), scored_ads)
    rankings = logged.rankings
    shift = (rankings.target_ranks - rankings.logged_ranks).astype(float)
    assert (shift != 0).mean() > 0.3
    for name, slope in (("click", CLICK_POSITION[0]), ("long_view", LONG_VIEW_POSITION)):
        true_rewards = probabilities_at_target(lake, logged.ads, str(raw), name, slope * shift)
        rewards = logged.ads.labels[:, list(lake.spec.objectives).index(name)]
        interval = estimate_policy_value(rewards, rankings).ips
        true_value = true_rewards.sum() / len(np.unique(rankings.request_ids))
        assert interval.low < true_value < interval.high, (name, true_value, interval)
        width = interval.high - interval.low
        assert width < MAX_RELATIVE_WIDTH[name] * true_value, "the interval is informative"
        if name == "click":
            continue  # parts have too few clicks for a bootstrap of heavy weights
        errors, half_widths = [], []
        for part in range(NUM_PARTS):  # users are independent, so each part is a log of its own
            in_part = rankings.user_ids % NUM_PARTS == part
            part_rankings = rankings.take(in_part)
            interval = estimate_policy_value(rewards[in_part], part_rankings).ips
            num_requests = len(np.unique(part_rankings.request_ids))
            errors.append(interval.value - true_rewards[in_part].sum() / num_requests)
            half_widths.append((interval.high - interval.low) / 2)
        scale = 1.96 * np.sqrt(np.square(errors).mean() / np.square(half_widths).mean())
        assert 0.4 < scale < 1.7, f"{name}: errors are {scale:.2f} times what intervals say"


def probabilities_at_target(
    lake: Lake, ads: ScoredAds, raw: str, objective: str, logit_shift: np.ndarray
) -> np.ndarray:
    """The true probabilities (B) of an objective, with the ads at their target positions."""
    from training.evaluation.predictions import Predictions

    objectives = tuple(lake.spec.objectives)
    rows = Predictions(
        objectives=objectives,
        impression_ids=ads.impression_ids,
        user_hashes=ads.user_ids,
        surface=np.zeros(len(ads.user_ids), np.int64),
        probabilities=ads.labels,
        labels=ads.labels.astype(np.float32),
        label_mask=np.ones(ads.labels.shape, bool),
    )
    truth = true_probabilities(rows, raw)
    assert truth is not None and len(truth.impression_ids) == len(ads.impression_ids)
    logits = logit(truth.probabilities[:, objectives.index(objective)])
    return np.asarray(expit(logits + logit_shift))


def test_a_missing_position_excludes_its_request_alone(
    lake: Lake, scored_ads: ScoredAds, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = load_logged_rankings(lake, (FIRST, LAST), scored_ads)
    missing, read = complete.ads.impression_ids[0], Snapshot.read

    def read_without(self: Snapshot, *args: Any, **values: Any) -> pa.Table:
        rows = read(self, *args, **values)
        is_missing = pc.equal(rows["impression_id"], missing)
        position = pc.if_else(is_missing, None, rows["position"])
        return rows.set_column(rows.column_names.index("position"), "position", position)

    monkeypatch.setattr(Snapshot, "read", read_without)
    found = load_logged_rankings(lake, (FIRST, LAST), scored_ads)
    assert found.num_excluded_requests == complete.num_excluded_requests + 1


def test_incomplete_requests_are_excluded_and_none_left_is_an_error(
    lake: Lake, scored_ads: ScoredAds
) -> None:
    complete = load_logged_rankings(lake, (FIRST, LAST), scored_ads)
    is_removed = scored_ads.impression_ids == complete.ads.impression_ids[0]
    incomplete = load_logged_rankings(lake, (FIRST, LAST), scored_ads.take(~is_removed))
    had_one_ad = (complete.ads.request_ids == complete.ads.request_ids[0]).sum() == 1
    num_excluded = complete.num_excluded_requests + (0 if had_one_ad else 1)
    assert incomplete.num_excluded_requests == num_excluded
    unlabelled = scored_ads._replace(has_final_labels=scored_ads.has_final_labels & False)
    with pytest.raises(UserError, match="no request has all its slots"):
        load_logged_rankings(lake, (FIRST, LAST), unlabelled)
