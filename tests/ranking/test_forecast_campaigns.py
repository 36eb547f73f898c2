"""Forecasts of campaigns: the auction, bids, budgets, caps, notes and refusals."""

import asyncio
from dataclasses import dataclass, replace
from datetime import date
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datasketches import update_theta_sketch

from benchmarks.studies.forecast_world import draw_boxes
from etl.errors import UserError
from ranking.forecast.reach import UserSketches
from ranking.forecast.schemas import ForecastRequest
from ranking.forecast.shard import IMPRESSIONS, SPEND, Campaign, Query, Shard, served_impressions
from ranking.forecast.sums import SampleSums
from ranking.scoring.auction import Auction
from tests.ranking.auctions import bids_of, scores_of
from tests.ranking.forecasts import EVERYTHING, SPEC, World, text_of


def test_a_campaign_wins_and_pays_as_in_an_auction_that_it_enters(complete_world: World) -> None:
    """The oracle is the auction itself, with the campaign as one more candidate of each request."""
    rng = np.random.default_rng(5)
    requests, places = 60, 4
    spec = SPEC
    p = rng.uniform(0.01, 0.2, (requests, 3))
    bids = rng.uniform(0.02, 0.5, (requests, places))
    values = np.sort(bids * p[:, 1:2], 1)[:, ::-1]  # all ads of a request have equal probabilities
    base = complete_world.rows.slice(0, requests * places)
    columns = {
        "sampled_user": np.repeat(np.arange(requests), places),
        "value": values.ravel(),
        "value_above": pa.array(
            np.concatenate([np.full((requests, 1), np.nan), values[:, :-1]], 1).ravel(),
            from_pandas=True,
        ),
        "target_surface": ["feed"] * (requests * places),
        **{f"p_{name}": np.repeat(p[:, k], places) for k, name in enumerate(spec.objectives)},
    }
    sample = base.append_column("probability", pa.array(np.ones(requests * places)))
    for name, column in columns.items():
        sample = sample.set_column(sample.schema.get_field_index(name), name, pa.array(column))
    shard = Shard(spec, sample, complete_world.tables.domain)
    click = list(spec.objectives).index("click")
    p_click = p[:, click]
    values_of = bids * p_click[:, None]
    for bid in (0.05, 0.2, 0.4):
        mine = Campaign("click", bid)
        got = shard.sums(Query("true", (), complete_world.tables.window, mine))
        wins, spend = 0, 0.0
        for r in range(requests):
            # The shown ads take `places`; the campaign is a further candidate.
            shown = np.sort(values[r])[::-1] / p[r, click]
            result = Auction(spec, "feed")(
                scores_of(np.tile(p[r], (places + 1, 1))),
                bids_of(np.append(shown, bid), ["traffic"] * (places + 1)),
                np.zeros(places + 1, np.int64),
            )
            if result.ranks[-1] < places:
                wins += 1
                spend += result.prices[-1] * p[r, click]
        assert got.totals[IMPRESSIONS] == wins
        assert got.totals[SPEND] == pytest.approx(spend, rel=1e-5)
    assert values_of.shape == values.shape


def test_reach_grows_with_the_bid_and_a_cap_bounds_impressions(complete_world: World) -> None:
    forecasts = [
        complete_world.forecast(goal="traffic", bid=bid).campaign for bid in (0.05, 0.1, 0.3, 3.0)
    ]
    for less, more in pairwise(forecasts):
        assert less.reach.value < more.reach.value and less.spend.value < more.spend.value
    capped = complete_world.forecast(goal="traffic", bid=3.0, frequency_cap=1).campaign
    assert capped.reach == forecasts[-1].reach
    growth = forecasts[-1].impressions.value / complete_world.rows.num_rows  # everything is won
    assert capped.impressions.value == pytest.approx(capped.reach.value * growth, rel=0.01)


def test_a_budget_lowers_spend_to_it_and_keeps_more_reach_than_impressions(
    complete_world: World,
) -> None:
    free = complete_world.forecast(goal="traffic", bid=0.3).campaign
    half = complete_world.forecast(goal="traffic", bid=0.3, budget=free.spend.value / 2).campaign
    assert half.spend.value == pytest.approx(free.spend.value / 2, rel=1e-3)
    assert half.spend.low < half.spend.value <= half.spend.high <= free.spend.value / 2
    assert half.participation == pytest.approx(0.5, rel=1e-3)
    assert half.impressions.value == pytest.approx(free.impressions.value / 2, abs=1)
    assert 0.5 * free.reach.value < half.reach.value < free.reach.value


@pytest.mark.parametrize("cap", [1, 3, 40, None])
def test_users_are_served_the_binomial_share_of_their_impressions_up_to_the_cap(
    cap: int | None,
) -> None:
    from scipy.stats import binom

    won, shares = np.arange(61), np.array([0.02, 0.3, 0.9, 1.0])
    found = served_impressions(won, shares, cap)
    served = np.minimum(won, won.max() if cap is None else cap)
    for share, row in zip(shares, found, strict=True):
        expected = [binom.pmf(won, n, share) @ served for n in won]
        np.testing.assert_allclose(row, expected, atol=1e-9)


def test_a_budget_is_spent_with_a_frequency_cap(complete_world: World) -> None:
    """In half of the auctions most users would still have as many impressions as the cap."""
    capped = {"goal": "traffic", "bid": 3.0, "frequency_cap": 2}
    free = complete_world.forecast(**capped).campaign
    half = complete_world.forecast(**capped, budget=free.spend.value / 2).campaign
    assert half.spend.value == pytest.approx(free.spend.value / 2, rel=0.01)
    assert half.participation < 0.3
    assert half.impressions.value < half.reach.value * 2 and half.reach.value < free.reach.value


def test_intervals_of_campaigns_cover_what_all_users_bring() -> None:
    """Reach, and the cost per click, of which spend and clicks vary together."""
    covered: dict[str, list[bool]] = {"reach": [], "cost": []}
    for seed in range(3):
        sampled, everyone = World(seed, 3000), World(seed, EVERYTHING)
        for box in draw_boxes(np.random.default_rng(seed), 150):
            request = {"targeting": text_of(box), "goal": "traffic", "bid": 0.2}
            try:
                found, truth = (w.forecast(**request).campaign for w in (sampled, everyone))
            except UserError:  # too few users
                continue
            if found is None or truth is None or truth.reach.value < 100:
                continue
            covered["reach"].append(found.reach.low <= truth.reach.value <= found.reach.high)
            cost = truth.cost_per_event.value
            covered["cost"].append(found.cost_per_event.low <= cost <= found.cost_per_event.high)
    assert len(covered["cost"]) > 100
    assert all(np.mean(values) > 0.9 for values in covered.values()), covered


def test_the_interval_of_the_cost_per_event_covers_that_of_all_users() -> None:
    covered, widths = [], []
    for seed in range(8):
        truth, found = (
            World(seed, rows).forecast(goal="traffic", bid=0.3).campaign.cost_per_event
            for rows in (EVERYTHING, 3000)
        )
        covered.append(found.low <= truth.value <= found.high)
        widths.append((found.high - found.low) / found.value)
        assert truth.high - truth.low < 0.01 * truth.value  # the noise alone
    assert np.mean(covered) > 0.8 and 0.01 < np.mean(widths) < 0.1


def test_a_shard_that_is_lost_after_the_first_query_is_reported(complete_world: World) -> None:
    @dataclass
    class LosesAShard:
        """A pool of two shards, of which one answers the first query only."""

        queries: int = 0

        async def sums(self, query: Query) -> SampleSums:
            self.queries += 1
            found = complete_world.shard.sums(query)
            return found if self.queries == 1 else replace(found, answered=0.5)

    forecaster = replace(complete_world.forecaster, pool=LosesAShard())
    request = ForecastRequest(targeting="age = 'age01'", goal="traffic", bid=0.3)
    forecast = asyncio.run(forecaster.forecast(request))
    assert forecast.answered_shards == 0.5
    assert "a part of the sample did not answer: intervals are wider" in forecast.notes


def test_notes_name_answers_of_the_model_and_sketches_that_contradict_the_sample(
    complete_world: World,
) -> None:
    three = "age = 'age01' and tier = 'tier03' and gender = 'gender00'"
    (note,) = World(0, 1500).forecast(targeting=three).notes
    assert "mostly that of the log-linear model" in note
    assert complete_world.forecast(targeting=three).notes == ()
    few = update_theta_sketch()
    for key in range(100):
        few.update(key)
    sketches = UserSketches({("age", "age01"): few.compact()}, frozenset({"age"}))
    wrong = replace(
        complete_world.forecaster, tables=replace(complete_world.tables, sketches=sketches)
    )
    (note,) = asyncio.run(wrong.forecast(ForecastRequest(targeting="age = 'age01'"))).notes
    assert "sketches count 9" in note or "sketches count 10" in note


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bid": 0.1}, "needs a bid and a goal"),
        ({"goal": "fame", "bid": 0.1}, "known: awareness, sales, traffic"),
        ({"budget": 5.0}, "needs a bid and a goal"),
        ({"first_day": "2026-03-08", "last_day": "2026-03-09"}, "the logs already have it"),
        ({"first_day": "2026-03-10", "last_day": "2026-03-09"}, "before its first day"),
        ({"first_day": "2026-03-09", "last_day": "2026-03-30"}, "raise forecast.window"),
        ({"first_day": "2026-04-06", "last_day": "2026-04-07"}, "begin at most 28 days later"),
        ({"first_day": "2026-03-09"}, "a first and a last day"),
        ({"targeting": "country = 'country20' and tier = 'tier03'"}, "fewer than 20 users"),
    ],
)
def test_requests_that_cannot_be_answered_are_refused(
    sampled_world: World, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        sampled_world.forecast(**fields)


def test_the_days_of_a_flight_that_is_too_long_are_not_listed(
    sampled_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ranking.forecast.forecaster.date_range", lambda *_: pytest.fail("listed"))
    with pytest.raises(UserError, match="shorten the flight"):
        sampled_world.forecast(first_day=date(2026, 3, 9), last_day=date(9999, 12, 31))
