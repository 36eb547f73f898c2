"""Forecasts of segments: estimates from a sample, the log-linear model, in-target rates."""

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.studies.forecast_world import draw_boxes
from etl.errors import UserError
from features.forecast.sampling import sampling_scale, workload_combinations
from ranking.forecast import log_linear
from ranking.forecast.conditions import Box
from ranking.forecast.log_linear import LogLinearModel, PairCounts
from ranking.forecast.schemas import Forecast, ForecastRequest, Interval
from ranking.forecast.shard import USERS, Query
from ranking.forecast.sums import (
    Estimate,
    SampleSums,
    combine_shards,
    gamma_quantile,
    posterior,
    students_t_quantile,
)
from ranking.forecast.targeting import parse_targeting
from tests.ranking.forecasts import World, text_of


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
        totals, variances, spends, covariances = [], [], [], []
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
            spends.append(found.totals[1])
            covariances.append(found.spend_covariances()[0])
            assert found.answered == (4 - lost) / 4
        error = np.std(totals) / np.sqrt(len(totals))
        assert abs(np.mean(totals) - quantity.sum()) < 4 * error
        assert np.mean(variances) == pytest.approx(np.var(totals), rel=0.1)
        assert np.mean(covariances) == pytest.approx(np.cov(totals, spends)[0, 1], rel=0.1)


def sums_of(quantity: Any, probability: Any) -> SampleSums:
    """Sums of a quantity, and of its square root in the place of the spend."""
    quantities = np.stack([quantity, np.sqrt(quantity)])
    weighted = quantities / probability
    return SampleSums(
        weighted.sum(1),
        (weighted**2).sum(1),
        (weighted * quantities).sum(1),
        (weighted * weighted[1]).sum(1),
        (weighted * quantities[1]).sum(1),
        quantities.max(1),
        len(quantity),
        0,
    )


@pytest.mark.parametrize("shape", [0.5, 3.0, 40.0])
def test_the_approximate_gamma_quantiles_are_close(shape: float) -> None:
    from scipy.stats import gamma

    for z, share in ((-1.96, 0.025), (1.96, 0.975)):
        assert gamma_quantile(shape, z) == pytest.approx(
            gamma.ppf(share, shape), rel=0.03, abs=0.02
        )


@pytest.mark.parametrize("degrees", [3.0, 8.0, 1e300])
def test_the_approximate_quantiles_of_students_t_are_close(degrees: float) -> None:
    from scipy.stats import t

    assert students_t_quantile(degrees) == pytest.approx(t.ppf(0.975, degrees), rel=0.01)


def test_segments_of_one_or_two_attributes_are_known_exactly(sampled_world: World) -> None:
    for box in [b for b in draw_boxes(np.random.default_rng(2), 60, context=True) if len(b) <= 2]:
        counts = sampled_world.world.user_counts(box)
        size = sampled_world.size(box)
        assert size.impressions.value == pytest.approx(counts.sum(), rel=1e-9, abs=1e-6)
        if "device" not in box:
            assert size.users.value == pytest.approx((counts > 0).sum(), rel=1e-9, abs=1e-6)


def test_a_sample_of_everyone_counts_exactly_what_no_model_covers(complete_world: World) -> None:
    targeting = parse_targeting(
        "country = 'country00' or (age = 'age01' and hour between 8 and 20)",
        complete_world.tables.domain,
    )
    sums = complete_world.shard.sums(Query(*targeting.sql(), complete_world.tables.window))
    frame = complete_world.rows.to_pandas()
    expected = frame[
        (frame.target_country == "country00")
        | ((frame.target_age == "age01") & frame.target_hour.between(8, 20))
    ]
    size = complete_world.forecaster.segment_size(targeting, sums)
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


def test_sketches_count_users_unless_two_attributes_are_of_the_context(
    complete_world: World,
) -> None:
    frame = complete_world.rows.to_pandas()
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
    found = complete_world.tables.sketches.users(box)
    assert found and found.value == chosen.sampled_user.nunique()  # of fewer users than it keeps
    assert complete_world.tables.sketches.users(box | {"hour": frozenset({3})}) is None


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


def test_an_in_target_rate_is_that_of_the_labels_weighted_by_their_users(
    complete_world: World,
) -> None:
    """The labels are those of `tier`, as if a data provider gave them."""
    young = {f"tier{k:02d}": Estimate(0.1 * k + 0.1, 0.1 * k, 0.1 * k + 0.2) for k in range(4)}
    precision = {
        "young": young,
        "old": {name: Estimate(1 - x.value, 1 - x.high, 1 - x.low) for name, x in young.items()},
    }
    measured = replace(
        complete_world.forecaster,
        tables=replace(complete_world.tables, precisions={"tier": precision}),
    )

    def forecast(targeting: str, *classes: str, **campaign: Any) -> Forecast:
        request = ForecastRequest(targeting=targeting, in_target=classes, **campaign)
        return asyncio.run(measured.forecast(request))

    both = forecast("tier in ('tier00', 'tier03') and gender = 'gender00'", "young")
    rate = both.in_target_rate
    assert rate is not None
    sizes = np.bincount(complete_world.world.values[np.unique(complete_world.world.user), 4])[
        [0, 3]
    ]
    assert rate.value == pytest.approx(sizes @ [0.1, 0.4] / sizes.sum(), abs=5e-4)
    assert rate.low < rate.value < rate.high
    everyone = forecast("tier = 'tier01'", "young", "old")
    assert everyone.in_target_rate == Interval(value=1.0, low=1.0, high=1.0)
    assert everyone.users_in_target == everyone.users
    assert forecast("tier = 'tier01'").users_in_target is None
    _assert_is_share(both.users_in_target, both.users, rate)
    campaign = forecast("tier in ('tier00', 'tier03')", "young", goal="traffic", bid=1.0).campaign
    assert campaign is not None
    _assert_is_share(campaign.reach_in_target, campaign.reach, rate)
    for targeting, class_, message in (
        ("gender = 'gender00'", "young", "labels of one data provider"),
        ("tier = 'tier01'", "child", "no audited class is called child"),
    ):
        with pytest.raises(UserError, match=message):
            forecast(targeting, class_)


def _assert_is_share(reach: Interval | None, users: Interval, rate: Interval) -> None:
    """A reach is a share of users, and as uncertain as each of them at least, both at most."""
    assert reach is not None
    one = 1  # by which rounding may change a number of users
    assert abs(reach.value - rate.value * users.value) < one
    assert reach.low < min(rate.low * users.value, rate.value * users.low) + one
    assert reach.high > max(rate.high * users.value, rate.value * users.high) - one
    assert reach.low > rate.low * users.low - one
    assert reach.high < rate.high * users.high + one


def test_segments_that_nobody_in_the_sample_is_in_are_answered_by_the_model() -> None:
    world = World(1, 250)
    listed = world.tables.listed_values
    covered, answered = [], 0
    for box in draw_boxes(np.random.default_rng(4), 1000):
        if not all(allowed <= set(listed[name] or ()) for name, allowed in box.items()):
            continue
        truth = int((world.world.user_counts(box) > 0).sum())
        targeting = parse_targeting(text_of(box), world.tables.domain)
        nobody = world.shard.sums(Query(*targeting.sql(), world.tables.window)).users == 0
        if len(box) < 3 or not nobody or world.size(box).users.value < 30:  # whatever the noise
            continue
        forecast = world.forecast(targeting=text_of(box), goal="traffic", bid=0.3)
        assert any("log-linear model" in note for note in forecast.notes)
        if forecast.campaign is not None:  # it may win too few users
            assert 0 < forecast.campaign.reach.value <= forecast.users.value
            answered += 1
        covered.append(forecast.users.low <= truth <= forecast.users.high)
    assert len(covered) > 5 and np.mean(covered) > 0.7 and answered > 2
