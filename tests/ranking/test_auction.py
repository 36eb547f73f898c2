"""Laws of the auction: prices, order, who takes part."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etl.errors import UserError
from etl.spec import DataSpec
from etl.spec.auction import MAX_MONEY, Terms
from ranking.auction import NO_ADVERTISER, OUT, Auction, Exclusion, Result, ranked

CLICK, CONVERSION, LONG_VIEW = range(3)  # columns of probabilities, by name
CHANCE = st.floats(0.001, 1)
BID = st.floats(0.01, 10)
CANDIDATE = st.tuples(CHANCE, CHANCE, CHANCE, BID, st.sampled_from(["awareness", "sales", None]))
TERMS = st.builds(
    Terms,
    reserve=st.sampled_from([0.0, 0.05]),
    quality=st.just("click"),
    floor=st.sampled_from([0.0, 0.3]),
    values=st.sampled_from([{}, {"click": 0.5}]),
)
REQUESTS = st.lists(st.lists(CANDIDATE, min_size=1, max_size=6), min_size=1, max_size=4)


def on_terms(spec: DataSpec, terms: Terms) -> Auction:
    assert spec.auction
    auction = spec.auction.model_copy(update={"terms": {"feed": terms}})
    return Auction(spec.model_copy(update={"auction": auction}), "feed")


def held(auction: Auction, requests: list) -> tuple[np.ndarray, np.ndarray, list, np.ndarray]:
    rows = [row for request in requests for row in request]
    owner = np.repeat(np.arange(len(requests)), [len(request) for request in requests])
    p, bids = np.array([row[:3] for row in rows]), np.array([row[3] for row in rows])
    return p, bids, [row[4] for row in rows], owner


@given(REQUESTS, TERMS)
def test_who_takes_part_stands_by_value_and_pays_no_more_than_bid(
    lake_spec: DataSpec, requests: list, terms: Terms
) -> None:
    auction = on_terms(lake_spec, terms)
    p, bids, goals, owner = held(auction, requests)
    found = auction(p, bids, goals, owner)
    paying = np.choose(
        [["awareness", "sales", None].index(g) for g in goals],
        [*p[:, [LONG_VIEW, CONVERSION]].T, 0],
    )
    payment = bids * paying
    np.testing.assert_allclose(found.values, payment + p[:, CLICK] * terms.values.get("click", 0))
    able = (payment > 0) & (payment >= terms.reserve) & (p[:, CLICK] >= terms.floor)
    assert ((found.places != OUT) == able).all()
    for request in np.unique(owner):
        there = np.flatnonzero((owner == request) & able)
        inside = there[np.argsort(found.places[there])]
        assert found.places[inside].tolist() == list(range(len(inside)))
        assert (np.diff(found.values[inside]) <= 0).all()
    assert (found.prices <= bids).all() and (found.prices >= 0).all()
    assert (found.prices[able] * paying[able] >= terms.reserve * (1 - 1e-9)).all()


@given(st.lists(CANDIDATE, min_size=2, max_size=6), TERMS, st.integers(0, 5))
def test_the_price_is_the_least_bid_that_keeps_the_place(
    lake_spec: DataSpec, request: list, terms: Terms, number: int
) -> None:
    auction = on_terms(lake_spec, terms)
    p, bids, goals, owner = held(auction, [request])
    found, own = auction(p, bids, goals, owner), number % len(request)
    price = found.prices[own]
    if found.places[own] == OUT or goals[own] is None or price < 1e-6:
        return
    for share, keeps in ((1 + 1e-6, True), (1 - 1e-6, False)):
        other = bids.copy()
        other[own] = price * share
        place = auction(p, other, goals, owner).places[own]
        assert (place == found.places[own]) == keeps or bids[own] < price * share


@given(st.lists(CANDIDATE, min_size=1, max_size=6), TERMS, st.integers(0, 5), st.floats(1, 3))
def test_a_higher_bid_never_costs_a_place(
    lake_spec: DataSpec, request: list, terms: Terms, number: int, more: float
) -> None:
    auction = on_terms(lake_spec, terms)
    p, bids, goals, owner = held(auction, [request])
    own = number % len(request)
    before = auction(p, bids, goals, owner).places[own]
    bids[own] *= more
    after = auction(p, bids, goals, owner).places[own]
    assert before == OUT or 0 <= after <= before


def test_requests_do_not_know_of_each_other(lake_spec: DataSpec) -> None:
    auction = on_terms(lake_spec, Terms())
    rng = np.random.default_rng(0)
    p, bids = rng.uniform(size=(30, 3)), rng.uniform(size=30)
    goals, owner = ["sales"] * 30, np.sort(rng.integers(0, 5, 30))
    whole = auction(p, bids, goals, owner)
    for request in np.unique(owner):
        rows = owner == request
        alone = auction(p[rows], bids[rows], goals[: rows.sum()], owner[rows])
        for name in ("values", "places", "prices"):
            np.testing.assert_array_equal(getattr(alone, name), getattr(whole, name)[rows])


def test_who_is_out_is_not_ranked_and_an_unknown_goal_is_named(lake_spec: DataSpec) -> None:
    result = Result(np.array([1.0, 3, 2]), np.array([OUT, 0, 1]), np.zeros(3), np.zeros(3))
    assert [(r.place, r.row) for r in ranked(np.zeros((3, 1)), result)] == [(0, 1), (1, 2)]
    with pytest.raises(UserError, match="unknown campaign goal fame; known: awareness"):
        Auction(lake_spec, "feed")(np.zeros((1, 3)), np.ones(1), ["fame"], np.zeros(1, int))


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
def test_nothing_takes_part_free_of_charge(
    lake_spec: DataSpec, bid: float, goal: str | None, surface: str, reason: Exclusion
) -> None:
    """With a reserve of 0, and a surface that gains from the event itself."""
    conversion = lake_spec.objectives["conversion"].model_copy(update={"surfaces": ("feed",)})
    spec = lake_spec.model_copy(
        update={"objectives": lake_spec.objectives | {"conversion": conversion}}
    )
    auction = Auction(on_terms(spec, Terms(values={"click": 0.5})).spec, surface)
    p = np.full((2, 3), 0.5)
    found = auction(p, np.array([bid, 1.0]), [goal, "traffic"], np.zeros(2, int))
    assert found.exclusions.tolist() == [reason, Exclusion.NONE]
    assert (found.places[0] == OUT) == (reason != Exclusion.NONE)
    assert np.isfinite(found.values).all() and np.isfinite(found.prices).all()


@given(
    st.lists(st.tuples(CANDIDATE, st.sampled_from([NO_ADVERTISER, 1, 2])), min_size=1, max_size=7),
    TERMS,
    st.integers(0, 6),
)
def test_ads_of_one_advertiser_do_not_set_each_others_price(
    lake_spec: DataSpec, request: list, terms: Terms, number: int
) -> None:
    """An ad pays the same when the other ads of its advertiser are taken out of the request."""
    auction = on_terms(lake_spec, terms)
    p, bids, goals, owner = held(auction, [[candidate for candidate, _ in request]])
    advertisers = np.array([advertiser for _, advertiser in request])
    own = number % len(request)
    same = (advertisers == advertisers[own]) & (advertisers != NO_ADVERTISER)
    kept = ~same | (np.arange(len(request)) == own)
    found = auction(p, bids, goals, owner, advertisers)
    few = [goal for goal, keep in zip(goals, kept, strict=True) if keep]
    alone = auction(p[kept], bids[kept], few, owner[kept], advertisers[kept])
    assert found.prices[own] == alone.prices[kept[:own].sum()]


def test_the_advertiser_is_no_part_of_the_tables_meaning(lake_spec: DataSpec) -> None:
    assert lake_spec.auction and lake_spec.auction.advertiser == "advertiser_id"
    told = lake_spec.model_dump()
    told["auction"]["advertiser"] = None
    assert DataSpec.model_validate(told).hash == lake_spec.hash


def test_without_an_auction_the_objective_that_the_spec_names_ranks(lake_spec: DataSpec) -> None:
    spec = lake_spec.model_copy(update={"auction": None, "rank_by": "long_view"})
    p = np.full((2, 3), 0.9)
    p[:, LONG_VIEW] = 0.1, 0.2
    found = Auction(spec, "feed")(p, np.zeros(2), [None, None], np.zeros(2, int))
    assert found.places.tolist() == [1, 0] and (found.prices == 0).all()
