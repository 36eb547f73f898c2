"""Forecasts: the targeting language, estimates from a sample, the auction, and what is hidden."""

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import replace
from datetime import date, timedelta
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from datasketches import update_theta_sketch
from hypothesis import given, reject
from hypothesis import strategies as st

from benchmarks.studies.forecast_world import USER_ATTRIBUTES, draw_boxes, sampled_days
from etl.errors import UserError
from features.forecast.sampling import sampling_scale, workload_combinations
from ranking.forecast import log_linear
from ranking.forecast.conditions import Box, Domain, TargetingError
from ranking.forecast.log_linear import LogLinearModel, PairCounts
from ranking.forecast.reach import UserSketches
from ranking.forecast.scale import NoiseSource, Scale, SegmentSize, SupplyGrowth
from ranking.forecast.schemas import ForecastRequest
from ranking.forecast.seasonality import days_after, forecast_days, similar_days
from ranking.forecast.shard import IMPRESSIONS, SPEND, USERS, Campaign, Query, Shard
from ranking.forecast.sums import (
    Estimate,
    SampleSums,
    combine_shards,
    gamma_estimate,
    gamma_quantile,
    posterior,
)
from ranking.forecast.targeting import parse_targeting
from ranking.scoring.auction import Auction
from tests.ranking.auctions import bids_of, scores_of
from tests.ranking.forecasts import EVERYTHING, SPEC, World, text_of

DOMAIN: Domain = {
    "surface": ["feed", "reels"],
    "country": ["DE", "FR", "US"],
    "hour": list(range(24)),
    "signup_days": None,
}


# ---- the targeting language


@pytest.mark.parametrize(
    ("text", "position", "message"),
    [
        ("country = 'US' and and", 20, "syntax error"),
        ("contry = 'US'", 1, "no attribute is called contry"),
        ("surface = 'feed' and country = 'USA'", 32, "did you mean 'US'"),
        ("hour between 20 and 8", 1, "is empty"),
        ("country > 'DE'", 11, "is not a number"),
        ("country between 1 and 2", 1, "have no order"),
        ("country = 'US' and hour < 5 and country = 'DE'", 33, "contradicts itself"),
        ("not country in ('DE', 'FR', 'US')", 5, "no value of country is left"),
        ("hour > 23", 1, "no value of hour"),
        (f"signup_days = {'9' * 400}", 15, "number is too large"),
        ("signup_days < 1e999", 15, "number is too large"),
        ("country = surface", 11, "a value is expected"),
        ("lower(country) = 'us'", 1, "an attribute is expected"),
        ("country like 'U%'", 9, "use and, or, not"),
        ("true) union select (1", 1, "one condition only"),
        ("1); drop table sample; select (2", 1, "one condition only"),
        ("x" * 3000, 2000, "at most 2,000"),
    ],
)
def test_a_targeting_that_cannot_be_used_is_refused_with_the_position(
    text: str, position: int, message: str
) -> None:
    with pytest.raises(TargetingError, match=message) as error:
        parse_targeting(text, DOMAIN)
    assert error.value.position == position


@pytest.mark.parametrize("mistake", ["contry = 'US'", "and country = 'US'"])
def test_positions_count_characters_also_after_letters_of_several_bytes(mistake: str) -> None:
    with pytest.raises(TargetingError) as error:
        parse_targeting(f"city = 'Zürich' and {mistake}", {**DOMAIN, "city": ["Zürich"]})
    assert error.value.position == 21


LEAVES_BY_ATTRIBUTE = (
    st.builds(
        lambda values, negated: f"country {'not ' * negated}in ({', '.join(map(repr, values))})",
        st.lists(st.sampled_from(["DE", "FR", "US"]), min_size=1, max_size=2, unique=True),
        st.booleans(),
    ),
    st.builds(lambda a, b: f"hour between {min(a, b)} and {max(a, b)}", *[st.integers(0, 23)] * 2),
    st.builds(
        lambda operator, bound: f"signup_days {operator} {bound}",
        st.sampled_from(["<", "<=", ">", ">=", "="]),
        st.integers(0, 9),
    ),
    st.sampled_from(["surface = 'feed'", "surface != 'feed'"]),
)
LEAVES = st.one_of(*LEAVES_BY_ATTRIBUTE)
TREES = st.recursive(
    LEAVES,
    lambda children: st.one_of(
        st.builds("not ({})".format, children),
        st.builds("({} and {})".format, children, children),
        st.builds("({} or {})".format, children, children),
    ),
    max_leaves=6,
)
ROWS = 300


def python_condition(text: str) -> str:
    """A targeting as a Python expression."""
    for name in ("country", "surface"):
        text = text.replace(f"{name} = ", f"{name} == ")
    text = text.replace("signup_days = ", "signup_days == ")
    words = text.split()
    for k, word in enumerate(words):
        if word == "between":
            words[k - 1 : k + 4] = [
                words[k - 1],
                "in",
                f"range({words[k + 1]},",
                f"1+{words[k + 3]})",
            ]
            return python_condition(" ".join(words).replace("range", "span"))
    return text.replace("span", "range")


def random_rows() -> pa.Table:
    """Rows of a sample with all users chosen, for the condition alone."""
    rng = np.random.default_rng(3)
    days = [None if k % 10 == 0 else float(k % 10) for k in range(ROWS)]
    return pa.table(
        {
            "surface": rng.choice(["feed", "reels"], ROWS),
            "country": rng.choice(["DE", "FR", "US"], ROWS),
            "hour": rng.integers(0, 24, ROWS),
            "signup_days": pa.array(days),
        }
    )


@given(st.permutations(LEAVES_BY_ATTRIBUTE).flatmap(lambda leaves: st.tuples(*leaves)))
def test_conditions_on_different_attributes_never_contradict_each_other(
    texts: tuple[str, ...],
) -> None:
    for text in (*texts, " and ".join(texts), " or ".join(texts)):
        assert parse_targeting(text, DOMAIN).condition is not None


@given(TREES)
def test_conditions_select_the_rows_that_python_selects(text: str) -> None:
    import duckdb

    try:
        targeting = parse_targeting(text, DOMAIN)
    except TargetingError as error:
        if "contradicts itself" in str(error) or "no value of" in str(error):
            reject()
        raise
    rows = random_rows()
    coded = {
        f"target_{name}": [
            value if known is None else list(known).index(value) for value in rows[name].to_pylist()
        ]
        for name, known in DOMAIN.items()
    }
    database = duckdb.connect()
    database.register("coded", pa.table(coded))
    condition, parameters = targeting.sql()
    selected = database.execute(f"SELECT {condition} FROM coded", parameters).fetchnumpy()
    code = compile(python_condition(text), "targeting", "eval")
    for found, row in zip(next(iter(selected.values())), rows.to_pylist(), strict=True):
        if row["signup_days"] is None:  # a missing number satisfies no comparison
            row["signup_days"] = float("nan")
        assert found == eval(code, {}, row)
        assert not found or row["country"] in targeting.possible_values("country")
        box = targeting.box()
        if box is not None:
            assert found == all(row[name] in allowed for name, allowed in box.items())


# ---- the sample


@given(
    st.lists(st.tuples(st.floats(0.01, 100), st.integers(1, 50)), min_size=1, max_size=30),
    st.floats(0.05, 1.5),
)
def test_a_sample_has_as_many_rows_as_its_budget(
    groups: list[tuple[float, int]], share: float
) -> None:
    importance, rows = (np.array(column, float) for column in zip(*groups, strict=True))
    budget = share * rows.sum()
    scale = sampling_scale(importance, rows, budget)
    kept = (np.minimum(1.0, scale * importance) * rows).sum()
    assert kept == pytest.approx(min(budget, rows.sum()), rel=1e-9)


def test_no_other_allocation_of_as_many_rows_has_a_smaller_variance_of_the_workload() -> None:
    """The variance of all targetings, each over its size, as `sampling.py` states it."""
    rng = np.random.default_rng(0)
    users, per_user = 400, rng.integers(1, 20, 400).astype(float)
    values = np.stack([rng.integers(0, k, users) for k in (2, 5, 9)], 1)
    sizes = []
    for names in workload_combinations(("0", "1", "2")):
        key = np.zeros(users, np.int64)
        for name in names:
            key = key * 10 + values[:, int(name)]
        _, index = np.unique(key, return_inverse=True)
        sizes.append(np.bincount(index.ravel())[index.ravel()])
    importance = np.sqrt(sum(1.0 / size for size in sizes)) / np.sqrt(per_user)
    budget = 0.3 * per_user.sum()
    pi = np.minimum(1.0, sampling_scale(importance, per_user, budget) * importance)

    def workload_variance(probability: Any) -> float:
        return float(sum(((1.0 / probability - 1.0) / size).sum() for size in sizes))

    best = workload_variance(pi)
    for _ in range(200):
        other = np.clip(pi * np.exp(0.2 * rng.standard_normal(users)), 1e-3, 1.0)
        other *= budget / (other * per_user).sum()
        if other.max() <= 1.0:
            assert workload_variance(other) > best


def test_totals_and_variances_are_unbiased_also_when_a_shard_is_lost() -> None:
    rng = np.random.default_rng(1)
    quantity, probability = rng.lognormal(0, 1, 300), rng.uniform(0.2, 1, 300)
    for lost in (0, 1):
        totals, variances = [], []
        for _ in range(4000):
            shard = rng.integers(0, 4, 300)
            chosen = rng.random(300) < probability
            parts = [
                sums_of(quantity[chosen & (shard == s)], probability[chosen & (shard == s)])
                for s in range(lost, 4)
            ]
            found = combine_shards(parts, 4)
            totals.append(found.totals[0])
            variances.append(found.variances()[0])
            assert found.answered == (4 - lost) / 4
        error = np.std(totals) / np.sqrt(len(totals))
        assert abs(np.mean(totals) - quantity.sum()) < 4 * error
        assert np.mean(variances) == pytest.approx(np.var(totals), rel=0.1)


def sums_of(quantity: Any, probability: Any) -> SampleSums:
    weighted = quantity / probability
    total, square, damped = (
        np.array([column.sum()]) for column in (weighted, weighted**2, weighted * quantity)
    )
    return SampleSums(total, square, damped, np.array([quantity.max()]), len(quantity), 0)


@pytest.mark.parametrize("shape", [0.5, 3.0, 40.0])
def test_the_approximate_gamma_quantiles_are_close(shape: float) -> None:
    from scipy.stats import gamma

    for z, share in ((-1.96, 0.025), (1.96, 0.975)):
        assert gamma_quantile(shape, z) == pytest.approx(
            gamma.ppf(share, shape), rel=0.03, abs=0.02
        )


# ---- the size of segments


@pytest.fixture(scope="module")
def sampled() -> World:
    return World(0, 4000)


@pytest.fixture(scope="module")
def complete() -> World:
    return World(0, EVERYTHING)


def test_segments_of_one_or_two_attributes_are_known_exactly(sampled: World) -> None:
    for box in [b for b in draw_boxes(np.random.default_rng(2), 60, context=True) if len(b) <= 2]:
        counts = sampled.world.user_counts(box)
        size = sampled.size(box)
        assert size.impressions.value == pytest.approx(counts.sum(), rel=1e-9, abs=1e-6)
        if "device" not in box:
            assert size.users.value == pytest.approx((counts > 0).sum(), rel=1e-9, abs=1e-6)


def test_a_sample_of_everyone_counts_exactly_what_no_model_covers(complete: World) -> None:
    targeting = parse_targeting(
        "country = 'country00' or (age = 'age01' and hour between 8 and 20)", complete.tables.domain
    )
    sums = complete.shard.sums(Query(*targeting.sql(), complete.tables.window))
    frame = complete.rows.to_pandas()
    expected = frame[
        (frame.target_country == "country00")
        | ((frame.target_age == "age01") & frame.target_hour.between(8, 20))
    ]
    size = complete.forecaster.segment_size(targeting, sums)
    assert size.users.value == expected.sampled_user.nunique()
    assert size.impressions.value == len(expected)
    assert size.users.low == size.users.high  # everyone is in the sample


def test_larger_targetings_are_covered_by_their_intervals_and_better_than_the_sample() -> None:
    covered, ours, sample_only = [], [], []
    for seed in range(4):
        world = World(seed, 3000)
        for box in draw_boxes(np.random.default_rng(seed), 150):
            counts = world.world.user_counts(box)
            users = int((counts > 0).sum())
            if len(box) < 3 or users < 20:
                continue
            size = world.size(box)
            covered.append(size.users.low <= users <= size.users.high)
            ours.append(abs(size.users.value / users - 1))
            targeting = parse_targeting(text_of(box), world.tables.domain)
            sums = world.shard.sums(Query(*targeting.sql(), world.tables.window))
            sample_only.append(abs(sums.totals[USERS] / users - 1))
    assert len(covered) > 80 and 0.9 < np.mean(covered) <= 1.0
    assert np.mean(ours) < 0.5 * np.mean(sample_only)


def test_sketches_count_users_unless_two_attributes_are_of_the_context(complete: World) -> None:
    frame = complete.rows.to_pandas()
    box: Box = {
        "age": frozenset({"age01", "age02"}),
        "tier": frozenset({"tier01"}),
        "device": frozenset({"device02"}),
    }
    chosen = frame[
        frame.target_age.isin(["age01", "age02"])
        & (frame.target_tier == "tier01")
        & (frame.target_device == "device02")
    ]
    found = complete.tables.sketches.users(box)
    assert found and found.value == chosen.sampled_user.nunique()  # of fewer users than it keeps
    assert complete.tables.sketches.users(box | {"hour": frozenset({3})}) is None


def test_the_log_linear_model_is_exact_for_independent_attributes() -> None:
    shares = [np.array([0.2, 0.8]), np.array([0.5, 0.3, 0.2]), np.array([0.6, 0.4])]
    single = np.concatenate(shares)
    counts = 1000 * np.outer(single, single)
    start = 0
    rows: dict[str, Mapping[str | int, int]] = {}
    for name, share in zip("abc", shares, strict=True):
        block = slice(start, start + len(share))
        counts[block, block] = np.diag(1000 * share)
        rows[name] = {k: start + k for k in range(len(share))}
        start += len(share)
    pairs = PairCounts(rows, counts, 1000.0)
    box: Box = {"a": frozenset({1}), "b": frozenset({0, 2}), "c": frozenset({1})}
    assert pairs.expected(box) == pytest.approx(1000 * 0.8 * 0.7 * 0.4)
    model = LogLinearModel(pairs, pairs, dispersion=0.01, impressions_per_user=2.0)
    prior = model.users_prior(box)
    assert prior and prior.variance == pytest.approx(prior.mean + 0.01 * prior.mean**2)


def test_the_errors_of_the_model_are_estimated_on_the_most_frequent_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three attributes of 600 values each have more combinations than fit in memory."""
    rng = np.random.default_rng(0)
    of_users = np.minimum(rng.zipf(1.5, (3, 2000)) - 1, 599)
    rows: dict[str, dict[str | int, int]] = {
        name: {v: 600 * k + v for v in range(600)} for k, name in enumerate("abc")
    }
    values = {name: 600 * k + of_users[k] for k, name in enumerate("abc")}
    counts = np.zeros((1800, 1800))
    for a, b in itertools.product(values.values(), repeat=2):
        np.add.at(counts, (a, b), 1)
    users = PairCounts(rows, counts, 2000.0)
    dispersions = []
    for most in (60, 100):
        monkeypatch.setattr(log_linear, "MAX_VALUES", most)
        model = log_linear.fit_log_linear(users, users, values, np.ones(2000), np.ones(2000))
        dispersions.append(model.dispersion)
    assert dispersions[0] == pytest.approx(dispersions[1], rel=0.1) and dispersions[1] > 0


def test_without_a_model_an_estimate_is_that_of_the_sample() -> None:
    estimate = posterior(500.0, 2500.0, 10.0, None)
    assert estimate.value == 500.0 and estimate.low < 410 and estimate.high > 600
    nobody = posterior(0.0, 0.0, 10.0, None)
    assert nobody.value == 0.0 and nobody.low < 0.1 and 15 < nobody.high < 40


def test_an_in_target_rate_is_that_of_the_labels_weighted_by_their_users(complete: World) -> None:
    """The labels are those of `tier`, as if a data provider gave them."""
    precision = {
        "young": {f"tier{k:02d}": Estimate(0.1 * k + 0.1, 0.1 * k, 0.1 * k + 0.2) for k in range(4)}
    }
    measured = replace(
        complete.forecaster, tables=replace(complete.tables, precisions={"tier": precision})
    )

    def rate_of(targeting: str, *classes: str) -> Any:
        request = ForecastRequest(targeting=targeting, in_target=classes)
        return asyncio.run(measured.forecast(request)).in_target_rate

    rate = rate_of("tier in ('tier00', 'tier03') and gender = 'gender00'", "young")
    sizes = np.bincount(complete.world.values[np.unique(complete.world.user), 4])[[0, 3]]
    assert rate.value == pytest.approx(sizes @ [0.1, 0.4] / sizes.sum())
    assert rate.low < rate.value < rate.high
    assert rate_of("tier = 'tier01'") is None
    for targeting, class_, message in (
        ("gender = 'gender00'", "young", "labels of one data provider"),
        ("tier = 'tier01'", "old", "no audited class is called old"),
    ):
        with pytest.raises(UserError, match=message):
            rate_of(targeting, class_)


# ---- campaigns


def test_a_campaign_wins_and_pays_as_in_an_auction_that_it_enters(complete: World) -> None:
    """The oracle is the auction itself, with the campaign as one more candidate of each request."""
    rng = np.random.default_rng(5)
    requests, places = 60, 4
    spec = SPEC
    p = rng.uniform(0.01, 0.2, (requests, 3))
    bids = rng.uniform(0.02, 0.5, (requests, places))
    values = np.sort(bids * p[:, 1:2], 1)[:, ::-1]  # all ads of a request have equal probabilities
    base = complete.rows.slice(0, requests * places)
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
    shard = Shard(spec, sample, complete.tables.domain)
    click = list(spec.objectives).index("click")
    p_click = p[:, click]
    values_of = bids * p_click[:, None]
    for bid in (0.05, 0.2, 0.4):
        mine = Campaign("click", bid)
        got = shard.sums(Query("true", (), complete.tables.window, mine))
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


def test_reach_grows_with_the_bid_and_a_cap_bounds_impressions(complete: World) -> None:
    forecasts = [
        complete.forecast(goal="traffic", bid=bid).campaign for bid in (0.05, 0.1, 0.3, 3.0)
    ]
    for less, more in pairwise(forecasts):
        assert less.reach.value < more.reach.value and less.spend.value < more.spend.value
    capped = complete.forecast(goal="traffic", bid=3.0, frequency_cap=1).campaign
    assert capped.reach == forecasts[-1].reach
    growth = forecasts[-1].impressions.value / complete.rows.num_rows  # everything is won
    assert capped.impressions.value == pytest.approx(capped.reach.value * growth, rel=0.01)


def test_a_budget_lowers_spend_to_it_and_keeps_more_reach_than_impressions(complete: World) -> None:
    free = complete.forecast(goal="traffic", bid=0.3).campaign
    half = complete.forecast(goal="traffic", bid=0.3, budget=free.spend.value / 2).campaign
    assert half.spend.value == pytest.approx(free.spend.value / 2, rel=1e-3)
    assert half.participation == pytest.approx(0.5, rel=1e-3)
    assert half.impressions.value == pytest.approx(free.impressions.value / 2, abs=1)
    assert 0.5 * free.reach.value < half.reach.value < free.reach.value


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


def test_notes_name_answers_of_the_model_and_sketches_that_contradict_the_sample(
    complete: World,
) -> None:
    three = "age = 'age01' and tier = 'tier03' and gender = 'gender00'"
    (note,) = World(0, 1500).forecast(targeting=three).notes
    assert "mostly that of the log-linear model" in note
    assert complete.forecast(targeting=three).notes == ()
    few = update_theta_sketch()
    for key in range(100):
        few.update(key)
    sketches = UserSketches({("age", "age01"): few.compact()}, frozenset({"age"}))
    wrong = replace(complete.forecaster, tables=replace(complete.tables, sketches=sketches))
    (note,) = asyncio.run(wrong.forecast(ForecastRequest(targeting="age = 'age01'"))).notes
    assert "sketches count 9" in note or "sketches count 10" in note


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bid": 0.1}, "needs a bid and a goal"),
        ({"goal": "fame", "bid": 0.1}, "known: awareness, traffic, sales"),
        ({"budget": 5.0}, "needs a bid and a goal"),
        ({"first_day": "2026-03-08", "last_day": "2026-03-09"}, "the logs already have it"),
        ({"first_day": "2026-03-10", "last_day": "2026-03-09"}, "before its first day"),
        ({"first_day": "2026-03-09", "last_day": "2026-03-30"}, "raise forecast.window"),
        ({"first_day": "2026-04-06", "last_day": "2026-04-07"}, "begin at most 28 days later"),
        ({"first_day": "2026-03-09"}, "a first and a last day"),
        ({"targeting": "country = 'country39' and tier = 'tier03'"}, "fewer than 20 users"),
    ],
)
def test_requests_that_cannot_be_answered_are_refused(
    sampled: World, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        sampled.forecast(**fields)


def test_the_days_of_a_flight_that_is_too_long_are_not_listed(
    sampled: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ranking.forecast.forecaster.date_range", lambda *_: pytest.fail("listed"))
    with pytest.raises(UserError, match="shorten the flight"):
        sampled.forecast(first_day=date(2026, 3, 9), last_day=date(9999, 12, 31))


def test_a_user_whose_weight_is_that_of_a_segment_is_not_answered() -> None:
    world = World(0, 400)
    user = world.sample["sampled_user"][0].as_py()
    row = world.sample.filter(pc.equal(world.sample["sampled_user"], user)).to_pylist()[0]
    one = " and ".join(f"{a} = {row[f'target_{a}']!r}" for a in USER_ATTRIBUTES)
    alone = f"{one} and signup_days between {row['target_signup_days']} and 99.5"
    sums = world.shard.sums(
        Query(*parse_targeting(alone, world.tables.domain).sql(), world.tables.window)
    )
    assert sums.users == 1 and sums.totals[USERS] > 20
    for targeting in (alone, f"({one}) or ({one})"):
        with pytest.raises(UserError, match="fewer than 20 users or too few in the sample"):
            world.forecast(targeting=targeting)


def test_no_count_of_few_users_is_answered(complete: World) -> None:
    segment = "country = 'country03' and age = 'age00'"  # 33 users in the window, 12 on its Monday
    assert complete.forecast(targeting=segment).users.value > 20
    monday = {"first_day": date(2026, 3, 9), "last_day": date(2026, 3, 9)}
    with pytest.raises(UserError, match="fewer than 20 users on the days of the flight"):
        complete.forecast(targeting=segment, **monday)
    few, many = (complete.forecast(goal="traffic", bid=bid) for bid in (0.02, 0.05))
    assert few.campaign is None and any("wins too few users" in note for note in few.notes)
    assert many.campaign.reach.value > 100 and many.users_by_sketch is None  # of everyone
    assert complete.forecast(targeting=segment).users_by_sketch.value > 20
    nobody = UserSketches({("age", "age03"): update_theta_sketch().compact()}, frozenset({"age"}))
    unknown = replace(complete.forecaster, tables=replace(complete.tables, sketches=nobody))
    request = ForecastRequest(targeting="age = 'age03'")
    assert asyncio.run(unknown.forecast(request)).users_by_sketch is None


def test_segments_that_nobody_in_the_sample_is_in_are_answered_by_the_model() -> None:
    world = World(1, 250)
    covered, answered = [], 0
    for box in draw_boxes(np.random.default_rng(4), 400):
        truth = int((world.world.user_counts(box) > 0).sum())
        targeting = parse_targeting(text_of(box), world.tables.domain)
        nobody = world.shard.sums(Query(*targeting.sql(), world.tables.window)).users == 0
        if len(box) < 3 or not nobody or world.size(box).users.value < 20:
            continue
        forecast = world.forecast(targeting=text_of(box), goal="traffic", bid=0.3)
        assert any("log-linear model" in note for note in forecast.notes)
        if forecast.campaign is not None:  # it may win too few users
            assert 0 < forecast.campaign.reach.value <= forecast.users.value
            answered += 1
        covered.append(forecast.users.low <= truth <= forecast.users.high)
    assert len(covered) > 5 and np.mean(covered) > 0.7 and answered > 2


# ---- what is hidden, and time


def test_equal_segments_have_equal_answers_and_single_users_are_hidden(complete: World) -> None:
    answers = {
        text: complete.forecast(targeting=text).users.value
        for text in (
            "age = 'age01' and gender = 'gender00'",
            "gender = 'gender00' and not age in ('age00', 'age02', 'age03', 'age04', 'age05')",
            "age = 'age01'",
        )
    }
    first, same, other = answers.values()
    assert first == same != other
    counts = complete.world.user_counts(
        {"age": frozenset({"age01"}), "gender": frozenset({"gender00"})}
    )
    truth = int((counts > 0).sum())
    assert first != truth and abs(first - truth) <= 5
    # The noise of a segment is drawn by its key, and each user changes that of all its segments.
    query = Query("true", (), complete.tables.window)
    users = complete.sample["sampled_user"].to_numpy()
    keys = [
        Shard(complete.spec, complete.sample.filter(users != user), complete.tables.domain)
        .sums(query)
        .key
        for user in np.unique(users)[:9]
    ]
    assert len({complete.shard.sums(query).key, *keys}) == 10


def test_no_interval_reveals_the_count_of_a_segment(complete: World) -> None:
    """The ratio of a bound and the value has the variance; less that of the growth, the noise's."""
    from scipy.optimize import brentq

    window = complete.tables.window
    everyone = parse_targeting("", complete.tables.domain)
    growth = complete.forecaster._growth(everyone, days_after(window[-1], len(window)), window)
    recovered = []
    for age, gender in itertools.product(range(6), range(2)):
        box: Box = {
            "age": frozenset({f"age{age:02d}"}),
            "gender": frozenset({f"gender{gender:02d}"}),
        }
        truth = int((complete.world.user_counts(box) > 0).sum())
        brought = complete.forecast(targeting=text_of(box), goal="traffic", bid=99.0).campaign
        for interval in (brought.spend, *brought.events.values()):
            ratio = interval.high / interval.value
            variance = brentq(lambda v, r=ratio: gamma_estimate(1.0, v).high - r, 1e-9, 1.0)
            users = 5.0 / np.sqrt(3.0 * max(variance - growth.relative_error**2, 1e-12))
            recovered.append(abs(users - truth) < 0.5)
    assert len(recovered) == 48 and np.mean(recovered) < 0.25  # by chance


def test_the_noise_of_a_segment_cannot_be_drawn_again_or_divided_out(complete: World) -> None:
    segment = "age = 'age01'"
    answer = complete.forecast(targeting=segment)
    for everyone in ("gender in ('gender00', 'gender01')", "(hour < 9 or hour >= 9)"):
        assert complete.forecast(targeting=f"{segment} and {everyone}") == answer
    bids = (0.08, 0.1, 0.12, 0.15, 0.2, 0.3, 3.0, 4.0)
    *swept, all_won, same = (
        complete.forecast(targeting=segment, goal="traffic", bid=bid).campaign for bid in bids
    )
    assert all_won == same and all_won.reach == answer.users  # what is counted is the same
    factors = []
    for bid, campaign in zip(bids, swept, strict=False):
        targeting = parse_targeting(segment, complete.tables.domain)
        query = Query(*targeting.sql(), complete.tables.window, Campaign("click", bid))
        truth = complete.shard.sums(query).totals[USERS]
        assert abs(campaign.reach.value - truth) <= 5.5
        assert campaign.reach.value == round(campaign.reach.value)
        factors.append(campaign.reach.value / truth - 1)
    assert np.ptp(factors) > 2 / truth  # more than rounding explains


@pytest.mark.parametrize("rest", ["", " and device = 'device00'"])  # with and without sketches
def test_a_number_has_one_answer_however_it_is_written(complete: World, rest: str) -> None:
    answer = complete.forecast(targeting=f"hour in (8, 9){rest}")
    for hours in ("in (8.0, 9)", "in (8, 9.0)", "in (8.0, 9.00, 8)", "between 8.0 and 9"):
        assert complete.forecast(targeting=f"hour {hours}{rest}") == answer


def test_a_segment_has_one_draw_of_noise_for_its_users(complete: World) -> None:
    for age in range(6):  # as few users as sketches count exactly
        answer = complete.forecast(targeting=f"age = 'age{age:02d}' and gender = 'gender00'")
        assert answer.users_by_sketch.value == answer.users.value


def test_the_noise_of_impressions_is_as_large_as_the_heaviest_user(complete: World) -> None:
    heaviest = 400
    row = complete.sample.filter(pc.equal(complete.sample["target_age"], "age01")).slice(0, 1)
    more = pa.concat_tables([complete.sample, *[row] * heaviest])
    query = Query("true", (), complete.tables.window)
    sums = Shard(complete.spec, more, complete.tables.domain).sums(query)
    assert sums.largest[IMPRESSIONS] > heaviest
    total = Estimate(*[float(sums.totals[IMPRESSIONS])] * 3)
    size = SegmentSize(Estimate(*[float(sums.users)] * 3), total)
    growth = SupplyGrowth(1.0, 0.02, True)
    answers = [
        Scale(size, sums, sums, growth, NoiseSource(f"{k}", 5.0)).impressions(sums, sums)
        for k in range(50)
    ]
    assert np.ptp([answer.value for answer in answers]) > 1.5 * heaviest
    assert all(answer.high - answer.low < 0.1 * total.value for answer in answers)


def test_weekdays_and_trend_are_found_and_last_week_is_repeated_where_that_was_better() -> None:
    rng = np.random.default_rng(0)
    days = [date(2026, 1, 5) + timedelta(days=k) for k in range(42)]
    week = np.array([1, 1, 1, 1, 1.2, 1.5, 1.4])
    level = 1000 * np.exp(0.01 * np.arange(49))
    truth = level * np.tile(week, 7)
    noise = np.exp(0.02 * rng.standard_normal(42))
    history = dict(zip(days, truth[:42] * noise, strict=True))
    found = forecast_days(history, days_after(days[-1], 7))
    assert found.backtest and found.backtest.model_error < found.backtest.repeat_error
    assert found.impressions.sum() == pytest.approx(truth[42:].sum(), rel=0.02)
    sundays = np.tile([100.0, 100, 100, 100, 100, 100, 8000], 6)  # more than the prior allows for
    repeated = forecast_days(dict(zip(days, sundays, strict=True)), days_after(days[-1], 7))
    assert repeated.backtest and repeated.backtest.repeat_error < repeated.backtest.model_error
    assert np.allclose(repeated.impressions, sundays[:7])


def test_a_weekday_without_logs_has_the_level_of_the_last_week_where_weeks_are_repeated() -> None:
    days = [date(2026, 1, 5) + timedelta(days=k) for k in range(42)]
    values = dict(zip(days, [100.0, 100, 100, 100, 100, 8000, 100] * 6, strict=True))
    history = {day: value for day, value in values.items() if day.weekday() != 6}
    found = forecast_days(history, days_after(days[-1], 7))
    assert found.backtest and found.backtest.repeat_error < found.backtest.model_error
    last_week = list(history.values())[-7:]
    assert found.impressions.tolist() == [100, 100, 100, 100, 100, 8000, np.mean(last_week)]


def test_a_targeting_on_a_surface_grows_with_it_whatever_else_it_names(complete: World) -> None:
    supply = {name: {**by_day} for name, by_day in complete.tables.supply.items()}
    for back, day in enumerate(sorted(supply["reels"], reverse=True)):
        supply["reels"][day] *= 0.97**back
    forecaster = replace(complete.forecaster, tables=replace(complete.tables, supply=supply))
    window = complete.tables.window

    def growth_of(text: str) -> float:
        targeting = parse_targeting(text, complete.tables.domain)
        return forecaster._growth(targeting, days_after(window[-1], 7), window).ratio

    reels = growth_of("surface = 'reels'")
    assert reels > 1.1 * growth_of("") and growth_of("signup_days < 50") == growth_of("")
    assert growth_of("surface = 'reels' and signup_days < 50") == reels
    others = "not surface in ('feed', 'messaging')"
    assert growth_of(f"{others} and (age = 'age01' or tier = 'tier01')") == reels


def test_a_flight_is_matched_with_days_of_its_weekdays() -> None:
    window = sampled_days()  # Monday to Sunday
    weekend = [date(2026, 3, 14), date(2026, 3, 15)]
    assert similar_days(weekend, window) == (date(2026, 3, 7), date(2026, 3, 8))
    assert similar_days(weekend, window[:3]) == (window[1], window[2])
