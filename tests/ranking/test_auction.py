"""Laws of the auction: prices, order, eligibility."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etl.errors import UserError
from etl.spec import DataSpec
from etl.spec.sections import MAX_MONEY, AuctionTerms
from ranking.scoring.auction import (
    EXCLUDED_RANK,
    Auction,
    AuctionResult,
    Exclusion,
    ranked_ads,
)
from ranking.scoring.candidates import NO_ADVERTISER
from tests.ranking.auctions import bids_of, scores_of

CLICK, CONVERSION, LONG_VIEW = range(3)  # columns of probabilities, by name
PROBABILITY = st.floats(0.001, 1)
BID = st.floats(0.01, 10)
GOAL = st.sampled_from(["awareness", "sales", None])
CANDIDATE = st.tuples(PROBABILITY, PROBABILITY, PROBABILITY, BID, GOAL)
TERMS = st.builds(
    AuctionTerms,
    reserve=st.sampled_from([0.0, 0.05]),
    quality_objective=st.just("click"),
    min_quality=st.sampled_from([0.0, 0.3]),
    objective_values=st.sampled_from([{}, {"click": 0.5}]),
)
REQUESTS = st.lists(st.lists(CANDIDATE, min_size=1, max_size=6), min_size=1, max_size=4)


def feed_auction(spec: DataSpec, terms: AuctionTerms) -> Auction:
    assert spec.auction
    auction = spec.auction.model_copy(update={"terms": {"feed": terms}})
    return Auction(spec.model_copy(update={"auction": auction}), "feed")


Candidate = tuple[float, float, float, float, str | None]


def to_arrays(
    requests: list[list[Candidate]],
) -> tuple[np.ndarray, np.ndarray, list[str | None], np.ndarray]:
    """Probabilities, bids, goals and request index of the candidates of some requests."""
    rows = [row for request in requests for row in request]
    request_index = np.repeat(np.arange(len(requests)), [len(request) for request in requests])
    p, bids = np.array([row[:3] for row in rows]), np.array([row[3] for row in rows])
    return p, bids, [row[4] for row in rows], request_index


@given(REQUESTS, TERMS)
def test_eligible_ads_are_ranked_by_value_and_pay_no_more_than_their_bid(
    lake_spec: DataSpec, requests: list[list[Candidate]], terms: AuctionTerms
) -> None:
    auction = feed_auction(lake_spec, terms)
    p, bids, goals, request_index = to_arrays(requests)
    result = auction(scores_of(p), bids_of(bids, goals), request_index)
    goal_probabilities = np.choose(
        [["awareness", "sales", None].index(goal) for goal in goals],
        [*p[:, [LONG_VIEW, CONVERSION]].T, 0],
    )
    payment = bids * goal_probabilities
    np.testing.assert_allclose(
        result.expected_values, payment + p[:, CLICK] * terms.objective_values.get("click", 0)
    )
    is_eligible = (payment > 0) & (payment >= terms.reserve) & (p[:, CLICK] >= terms.min_quality)
    assert ((result.ranks != EXCLUDED_RANK) == is_eligible).all()
    for request in np.unique(request_index):
        eligible = np.flatnonzero((request_index == request) & is_eligible)
        in_order = eligible[np.argsort(result.ranks[eligible])]
        assert result.ranks[in_order].tolist() == list(range(len(in_order)))
        assert (np.diff(result.expected_values[in_order]) <= 0).all()
    assert (result.prices <= bids).all() and (result.prices >= 0).all()
    expected_prices = result.prices[is_eligible] * goal_probabilities[is_eligible]
    assert (expected_prices >= terms.reserve * (1 - 1e-9)).all()


@given(st.lists(CANDIDATE, min_size=2, max_size=6), TERMS, st.integers(0, 5))
def test_the_price_is_the_lowest_bid_that_keeps_the_rank(
    lake_spec: DataSpec, request: list[Candidate], terms: AuctionTerms, number: int
) -> None:
    auction = feed_auction(lake_spec, terms)
    p, bids, goals, request_index = to_arrays([request])
    result, ad = auction(scores_of(p), bids_of(bids, goals), request_index), number % len(request)
    price = result.prices[ad]
    if result.ranks[ad] == EXCLUDED_RANK or goals[ad] is None or price < 1e-6:
        return
    for factor, keeps_rank in ((1 + 1e-6, True), (1 - 1e-6, False)):
        changed_bids = bids.copy()
        changed_bids[ad] = price * factor
        rank = auction(scores_of(p), bids_of(changed_bids, goals), request_index).ranks[ad]
        assert (rank == result.ranks[ad]) == keeps_rank or bids[ad] < price * factor


@given(st.lists(CANDIDATE, min_size=1, max_size=6), TERMS, st.integers(0, 5), st.floats(1, 3))
def test_a_higher_bid_never_lowers_the_rank(
    lake_spec: DataSpec, request: list[Candidate], terms: AuctionTerms, number: int, factor: float
) -> None:
    auction = feed_auction(lake_spec, terms)
    p, bids, goals, request_index = to_arrays([request])
    ad = number % len(request)
    before = auction(scores_of(p), bids_of(bids, goals), request_index).ranks[ad]
    bids[ad] *= factor
    after = auction(scores_of(p), bids_of(bids, goals), request_index).ranks[ad]
    assert before == EXCLUDED_RANK or 0 <= after <= before


def test_requests_do_not_influence_each_other(lake_spec: DataSpec) -> None:
    auction = feed_auction(lake_spec, AuctionTerms())
    rng = np.random.default_rng(0)
    p, bids = rng.uniform(size=(30, 3)), rng.uniform(size=30)
    goals, request_index = ["sales"] * 30, np.sort(rng.integers(0, 5, 30))
    together = auction(scores_of(p), bids_of(bids, goals), request_index)
    for request in np.unique(request_index):
        rows = request_index == request
        alone = auction(
            scores_of(p[rows]), bids_of(bids[rows], goals[: rows.sum()]), request_index[rows]
        )
        for name in ("expected_values", "ranks", "prices"):
            np.testing.assert_array_equal(getattr(alone, name), getattr(together, name)[rows])


def test_an_excluded_ad_is_not_ranked_and_an_unknown_goal_is_named(lake_spec: DataSpec) -> None:
    values, ranks = np.array([1.0, 3, 2]), np.array([EXCLUDED_RANK, 0, 1])
    result = AuctionResult(np.zeros(3), values, ranks, np.zeros(3), np.zeros(3, int))
    ads = ranked_ads(scores_of(np.zeros((3, 1))), result)
    assert [(ad.rank, ad.candidate_index) for ad in ads] == [(0, 1), (1, 2)]
    with pytest.raises(UserError, match="unknown campaign goal fame; known: awareness"):
        Auction(lake_spec, "feed")(
            scores_of(np.zeros((1, 3))), bids_of([1.0], ["fame"]), np.zeros(1, int)
        )


@pytest.mark.parametrize(
    ("bid", "goal", "surface", "reason"),
    [
        (0.0, "traffic", "feed", Exclusion.NO_BID),
        (-1.0, "traffic", "feed", Exclusion.NO_BID),
        (float("nan"), "traffic", "feed", Exclusion.NO_BID),
        (1e308, "traffic", "feed", Exclusion.NO_BID),
        (1.0, None, "feed", Exclusion.NO_GOAL),
        (1.0, "sales", "reels", Exclusion.GOAL_NOT_SERVED),
        (1.0, "traffic", "feed", Exclusion.NONE),
        (MAX_MONEY, "traffic", "feed", Exclusion.NONE),
    ],
)
def test_no_ad_takes_part_without_a_bid_and_a_goal(
    lake_spec: DataSpec, bid: float, goal: str | None, surface: str, reason: Exclusion
) -> None:
    """Even with a reserve of 0, on a surface on which the event itself has a value."""
    conversion = lake_spec.objectives["conversion"].model_copy(update={"surfaces": ("feed",)})
    spec = lake_spec.model_copy(
        update={"objectives": lake_spec.objectives | {"conversion": conversion}}
    )
    terms = AuctionTerms(objective_values={"click": 0.5})
    auction = Auction(feed_auction(spec, terms).spec, surface)
    p = np.full((2, 3), 0.5)
    result = auction(scores_of(p), bids_of([bid, 1.0], [goal, "traffic"]), np.zeros(2, int))
    assert result.exclusions.tolist() == [reason, Exclusion.NONE]
    assert (result.ranks[0] == EXCLUDED_RANK) == (reason != Exclusion.NONE)
    assert np.isfinite(result.expected_values).all() and np.isfinite(result.prices).all()


VALUE_CANDIDATE = st.tuples(PROBABILITY, st.floats(0.1, 50), st.floats(0.5, 20), BID)


@given(st.lists(VALUE_CANDIDATE, min_size=2, max_size=6), st.floats(0.2, 5))
def test_a_target_return_bids_the_value_over_the_target_at_most_the_bid(
    lake_spec: DataSpec, request: list[tuple[float, float, float, float]], scale: float
) -> None:
    """The return of what is paid is at least the target, in any currency."""
    auction = feed_auction(lake_spec, AuctionTerms())
    probability, values, targets, limits = np.array(request).T
    p, outcome_values = np.zeros((2, len(request), 3))
    p[:, CONVERSION], outcome_values[:, CONVERSION] = probability, values
    bids = bids_of(limits, ["sales"] * len(request), target_roas=targets)
    request_index = np.zeros(len(request), int)
    result = auction(scores_of(p, outcome_values), bids, request_index)
    expected = np.minimum(limits, values / targets)
    np.testing.assert_allclose(result.effective_bids, expected)
    fixed = auction(scores_of(p), bids_of(expected, bids.goals), request_index)
    assert (fixed.ranks == result.ranks).all()
    np.testing.assert_array_equal(fixed.prices, result.prices)
    paid = result.prices > 0
    assert (values[paid] / result.prices[paid] >= targets[paid] * (1 - 1e-9)).all()
    other_currency = auction(
        scores_of(p, outcome_values * scale),
        bids_of(limits * scale, bids.goals, target_roas=targets),
        request_index,
    )
    np.testing.assert_allclose(other_currency.prices, result.prices * scale)


def test_a_target_return_without_a_value_is_excluded(lake_spec: DataSpec) -> None:
    """Its campaign would bid without a limit for clicks, which have no value."""
    auction = feed_auction(lake_spec, AuctionTerms())
    bids = bids_of([1.0, 0.0, 1.0], ["traffic", "traffic", None], target_roas=2.0)
    result = auction(scores_of(np.full((3, 3), 0.5)), bids, np.zeros(3, int))
    reasons = [Exclusion.NO_VALUE, Exclusion.NO_BID, Exclusion.NO_GOAL]
    assert result.exclusions.tolist() == reasons


@given(
    st.lists(st.tuples(CANDIDATE, st.sampled_from([NO_ADVERTISER, 1, 2])), min_size=1, max_size=7),
    TERMS,
    st.integers(0, 6),
)
def test_ads_of_one_advertiser_do_not_set_each_others_price(
    lake_spec: DataSpec, request: list[tuple[Candidate, int]], terms: AuctionTerms, number: int
) -> None:
    """An ad pays the same when the other ads of its advertiser are removed from the request."""
    auction = feed_auction(lake_spec, terms)
    p, bids, goals, request_index = to_arrays([[candidate for candidate, _ in request]])
    advertisers = np.array([advertiser for _, advertiser in request])
    ad = number % len(request)
    is_same = (advertisers == advertisers[ad]) & (advertisers != NO_ADVERTISER)
    remains = ~is_same | (np.arange(len(request)) == ad)
    together = auction(scores_of(p), bids_of(bids, goals, advertisers), request_index)
    alone = auction(
        scores_of(p[remains]),
        bids_of(bids[remains], [goals[i] for i in np.flatnonzero(remains)], advertisers[remains]),
        request_index[remains],
    )
    assert together.prices[ad] == alone.prices[remains[:ad].sum()]


def test_the_advertiser_attribute_does_not_change_the_spec_hash(lake_spec: DataSpec) -> None:
    assert lake_spec.auction and lake_spec.auction.advertiser == "advertiser_id"
    spec = lake_spec.model_dump()
    spec["auction"]["advertiser"] = None
    assert DataSpec.model_validate(spec).hash == lake_spec.hash


def test_without_an_auction_candidates_are_ranked_by_the_specs_objective(
    lake_spec: DataSpec,
) -> None:
    spec = lake_spec.model_copy(update={"auction": None, "rank_by": "long_view"})
    p = np.full((2, 3), 0.9)
    p[:, LONG_VIEW] = 0.1, 0.2
    result = Auction(spec, "feed")(
        scores_of(p), bids_of([0.0, 0.0], [None, None]), np.zeros(2, int)
    )
    assert result.ranks.tolist() == [1, 0] and (result.prices == 0).all()
