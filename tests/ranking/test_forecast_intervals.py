"""What the intervals of a forecast cover."""

import numpy as np
import pyarrow as pa
import pytest

from etl.array_types import Float64
from ranking.forecast.expansion import NoiseSource, SampleExpansion, SegmentSize, SupplyGrowth
from ranking.forecast.shard import IMPRESSIONS, SPEND, USERS, Campaign, Query, Shard
from ranking.forecast.sums import Estimate, SampleSums
from tests.ranking.forecasts import World

SAMPLING_RATE = 0.05
SAMPLES = 80
QUANTITIES = {"impressions": IMPRESSIONS, "spend": SPEND, "clicks": SPEND + 2}


def sampled_shard(world: World, seed: int) -> Shard:
    """A shard with a sample of the users."""
    chosen = np.random.default_rng(seed).random(len(world.world.values)) < SAMPLING_RATE
    sample = world.rows.filter(pa.array(chosen[world.world.user]))
    rates = pa.array(np.full(len(sample), SAMPLING_RATE))
    return Shard(world.spec, sample.append_column("probability", rates), world.tables.domain)


def test_the_interval_of_the_cost_per_event_covers_with_few_sampled_users() -> None:
    """Eight users with a click or more, whose prices vary, of whom a hundredth is in the sample."""
    rng, covered = np.random.default_rng(0), []
    known = Estimate(800.0, 800.0, 800.0)
    for _ in range(2000):
        clicks = 1.0 + rng.poisson(2.0, 8)
        spend = clicks * rng.gamma(4.0, 0.25, 8)
        sums = sampled_sums(np.stack([np.ones(8), clicks, spend, clicks]) / 0.01, 0.01)
        growth, noise = SupplyGrowth(1.0, 0.0, True), NoiseSource("", 0.0)
        expansion = SampleExpansion(SegmentSize(known, known), sums, sums, growth, noise)
        cost = expansion.cost(float(spend.sum() / clicks.sum()), sums, SPEND + 1, sums)
        covered.append(cost.low <= 1.0 <= cost.high)
    assert np.mean(covered) > 0.9


def sampled_sums(weighted: Float64, probability: float) -> SampleSums:
    """Sums over users (U) of quantities over probabilities (Q, U), all with one probability."""
    squares, products = (weighted**2).sum(1), (weighted * weighted[SPEND]).sum(1)
    return SampleSums(
        weighted.sum(1),
        squares,
        squares * probability,
        products,
        products * probability,
        weighted.max(1) * probability,
        weighted.shape[1],
        0,
    )


@pytest.mark.parametrize("campaign", [None, Campaign("click", 0.3)], ids=["segment", "campaign"])
@pytest.mark.parametrize("num_days", [1, 3])
def test_intervals_of_a_flight_shorter_than_the_window_cover_what_it_brings(
    complete_world: World, campaign: Campaign | None, num_days: int
) -> None:
    """The size of the segment in the window is known exactly."""
    window, everyone = complete_world.tables.window, ("true", ())
    size = SegmentSize(
        *[
            Estimate(*[float(total)] * 3)
            for total in complete_world.shard.sums(Query(*everyone, window)).totals[:2]
        ]
    )
    days = window[:num_days]
    truth = complete_world.shard.sums(Query(*everyone, days, campaign)).totals
    covered: dict[str, list[bool]] = {}
    for seed in range(SAMPLES):
        shard = sampled_shard(complete_world, seed)
        in_window, in_flight = (shard.sums(Query(*everyone, of)) for of in (window, days))
        won = shard.sums(Query(*everyone, days, campaign))
        growth = SupplyGrowth(1.0, 0.0, True)
        expansion = SampleExpansion(size, in_window, in_flight, growth, NoiseSource(f"{seed}", 5.0))
        found = {"users": (expansion.users(won, won), truth[USERS])}
        for name, quantity in QUANTITIES.items():
            if quantity < len(truth):
                found[name] = expansion.volume(won, quantity, won), truth[quantity]
        for name, (interval, value) in found.items():
            covered.setdefault(name, []).append(interval.low <= value <= interval.high)
    for name, hits in covered.items():
        assert np.mean(hits) > 0.87, (name, np.mean(hits))
