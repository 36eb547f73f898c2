"""Estimators of the value of a target ranking of the logged ads.

The log has, for each slot, the propensity with which its ad was drawn from the ads not shown in
earlier slots (Plackett-Luce). They determine the probability of each ad at each position, given the
ads that were shown.

The value of the target ranking is estimated by inverse propensity scoring with the item-position
click model (Li, Abbasi-Yadkori, Kveton, Muthukrishnan, Vinay and Wen 2018): the reward of an ad
counts if the target ranking leaves the ad at its logged position, divided by the propensity of that
position. This is unbiased if a reward depends on the ad, the request and the position, but not on
the neighboring ads.

N requests of K ads each, in the order of their slots; B ads.
"""

from dataclasses import dataclass
from itertools import permutations

import numpy as np
import numpy.typing as npt
from scipy.stats import bootstrap

from etl.array_types import Float64, Int64
from training.evaluation.predictions import ConfidenceInterval

MAX_ADS_PER_REQUEST = 6  # limits the enumeration of all orders of the ads
REQUEST_BATCH_SIZE = 4096
NUM_BOOTSTRAP_RESAMPLES = 1000
RESAMPLED_USERS = 10_000_000  # at a time
MAX_PROPENSITY = 1 - 1e-6  # of a slot before the last, so that the ads after it have shares


def position_propensities(slot_propensities: Float64) -> Float64:
    """The propensity of each ad at each position (N, K, K), from those of the slots (N, K).

    Each ad has a position and each position an ad: rows and columns sum to 1.
    """
    num_requests, num_ads = slot_propensities.shape
    assert num_ads <= MAX_ADS_PER_REQUEST
    num_batches = max(1, -(-num_requests // REQUEST_BATCH_SIZE))
    batches = np.array_split(slot_propensities, num_batches)
    return np.concatenate([_position_propensities(batch) for batch in batches])


def first_slot_shares(slot_propensities: Float64) -> Float64:
    """The probability (N, K) of each ad to be drawn for the first slot."""
    not_drawn = np.cumprod(1 - slot_propensities, 1)
    before = np.concatenate((np.ones((len(not_drawn), 1)), not_drawn[:, :-1]), 1)
    return slot_propensities * before


def _position_propensities(slot_propensities: Float64) -> Float64:
    num_ads = slot_propensities.shape[1]
    orders = np.array(list(permutations(range(num_ads))))
    drawn = slot_propensities.copy()
    drawn[:, :-1] = np.minimum(drawn[:, :-1], MAX_PROPENSITY)
    shares = first_slot_shares(drawn)[:, orders]  # (N, orders, K)
    of_other_ads = np.prod(1 - drawn, 1)[:, None, None]
    remaining = np.cumsum(shares[..., ::-1], 2)[..., ::-1] + of_other_ads
    order_probabilities = np.prod(shares / remaining, 2)
    order_probabilities /= order_probabilities.sum(1, keepdims=True)
    propensities = np.empty((len(slot_propensities), num_ads, num_ads))
    for ad in range(num_ads):
        for position in range(num_ads):
            is_there = orders[:, position] == ad
            propensities[:, ad, position] = order_probabilities[:, is_there].sum(1)
    return propensities


@dataclass(frozen=True)
class RankingPair:
    """The logged and the target ranking of B ads.

    Attributes:
        logged_ranks: Positions (B) in the log, from 0.
        target_ranks: Positions (B) in the target ranking, from 0.
        propensities: The propensities (B) of the logged positions.
        request_ids: The request (B) of each ad, as a number.
        user_ids: The user (B) of each ad, as a number.
    """

    logged_ranks: Int64
    target_ranks: Int64
    propensities: Float64
    request_ids: Int64
    user_ids: Int64

    def take(self, rows: npt.NDArray[np.generic]) -> "RankingPair":
        """Some of the ads, by a mask or by indices."""
        return RankingPair(
            logged_ranks=self.logged_ranks[rows],
            target_ranks=self.target_ranks[rows],
            propensities=self.propensities[rows],
            request_ids=self.request_ids[rows],
            user_ids=self.user_ids[rows],
        )


@dataclass(frozen=True)
class PolicyValueEstimate:
    """The mean reward of a request: as logged, by the target ranking (IPS), and the difference."""

    logged: ConfidenceInterval
    ips: ConfidenceInterval
    difference: ConfidenceInterval


def estimate_policy_value(rewards: Float64, rankings: RankingPair) -> PolicyValueEstimate:
    """Estimate the mean reward of a request from the rewards (B) of its ads.

    The confidence intervals are bootstrapped over users.
    """
    is_same_rank = rankings.logged_ranks == rankings.target_ranks
    weighted = rewards * is_same_rank / rankings.propensities
    _, first, request = np.unique(rankings.request_ids, return_index=True, return_inverse=True)
    _, user = np.unique(rankings.user_ids[first], return_inverse=True)

    def sum_by_user(values: Float64) -> Float64:
        by_request = np.bincount(request, values, len(first))
        return np.bincount(user, by_request).astype(np.float64)

    num_requests = np.bincount(user).astype(np.float64)
    logged, ips = sum_by_user(rewards), sum_by_user(weighted)
    return PolicyValueEstimate(
        logged=_bootstrap_interval(logged, num_requests),
        ips=_bootstrap_interval(ips, num_requests),
        difference=_bootstrap_interval(ips - logged, num_requests),
    )


def _bootstrap_interval(reward_sums: Float64, num_requests: Float64) -> ConfidenceInterval:
    """The mean reward of a request with its 95 % interval, from sums by user.

    The bounds of a single user are NaN.
    """
    value = float(_ratio_of_sums(reward_sums, num_requests))
    if len(reward_sums) < 2:
        return ConfidenceInterval(value, np.nan, np.nan)
    result = bootstrap(
        (reward_sums, num_requests),
        _ratio_of_sums,
        paired=True,
        vectorized=True,
        n_resamples=NUM_BOOTSTRAP_RESAMPLES,
        batch=max(1, min(100, RESAMPLED_USERS // len(reward_sums))),
        method="percentile",
        rng=np.random.default_rng(0),
    )
    low, high = result.confidence_interval
    return ConfidenceInterval(value, float(low), float(high))


def _ratio_of_sums(reward_sums: Float64, num_requests: Float64, axis: int = -1) -> Float64:
    return np.asarray(reward_sums.sum(axis) / num_requests.sum(axis))


def ndcg(rewards: Float64, ranks: Int64, request_ids: Int64) -> float:
    """Mean NDCG (Järvelin and Kekäläinen 2002) of the requests with a reward; NaN without any.

    Args:
        rewards: The rewards (B) of ads.
        ranks: Their positions (B), from 0.
        request_ids: Their requests (B).
    """
    _, request = np.unique(request_ids, return_inverse=True)
    by_reward = np.lexsort((-rewards, request))
    _, first, size = np.unique(request, return_index=True, return_counts=True)
    ideal_ranks = np.empty(len(by_reward), np.int64)
    ideal_ranks[by_reward] = np.arange(len(by_reward)) - np.repeat(np.sort(first), size)
    dcg = np.bincount(request, rewards / np.log2(2 + ranks))
    ideal_dcg = np.bincount(request, rewards / np.log2(2 + ideal_ranks))
    has_reward = ideal_dcg > 0
    if not has_reward.any():
        return float("nan")
    return float((dcg[has_reward] / ideal_dcg[has_reward]).mean())
