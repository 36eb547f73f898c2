"""The supply of a flight: weekdays and trend, surfaces, and days that stand for it."""

import asyncio
from dataclasses import replace
from datetime import date, timedelta

import numpy as np
import pytest

from benchmarks.studies.forecast_world import sampled_days
from etl.array_types import Float64
from etl.errors import UserError
from ranking.forecast.schemas import ForecastRequest
from ranking.forecast.seasonality import days_after, forecast_days, similar_days
from ranking.forecast.sums import Z95
from ranking.forecast.targeting import parse_targeting
from tests.ranking.forecasts import World


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


def simulated_supply(kind: str, seed: int, days: int) -> Float64:
    """Daily impressions with weekday effects, and a level that has a trend or is a random walk."""
    rng = np.random.default_rng(seed)
    week = np.resize([0, 0, 0, 0, 0.18, 0.4, 0.34], days)
    steps = np.full(days, 0.006) if kind == "trend" else 0.02 * rng.standard_normal(days)
    return 1000 * np.exp(week + np.cumsum(steps) + 0.03 * rng.standard_normal(days))


@pytest.mark.parametrize("kind", ["trend", "random walk"])
@pytest.mark.parametrize(("lead", "length"), [(0, 1), (0, 7), (14, 7), (28, 7)])
def test_the_error_of_supply_covers_flights_however_late_they_begin(
    kind: str, lead: int, length: int
) -> None:
    days = [date(2026, 1, 5) + timedelta(days=k) for k in range(42)]
    scores = []
    for seed in range(60):
        supply = simulated_supply(kind, seed, len(days) + lead + length)
        flight = days_after(days[-1], lead + length)[lead:]
        found = forecast_days(dict(zip(days, supply, strict=False)), flight)
        ratio = supply[-length:].sum() / found.impressions.sum()
        scores.append((ratio - 1) / found.relative_error)
    assert np.mean(np.abs(scores) < Z95) > (0.85 if kind == "trend" else 0.75)


def test_a_weekday_without_logs_has_the_level_of_the_last_week_where_weeks_are_repeated() -> None:
    days = [date(2026, 1, 5) + timedelta(days=k) for k in range(42)]
    values = dict(zip(days, [100.0, 100, 100, 100, 100, 8000, 100] * 6, strict=True))
    history = {day: value for day, value in values.items() if day.weekday() != 6}
    found = forecast_days(history, days_after(days[-1], 7))
    assert found.backtest and found.backtest.repeat_error < found.backtest.model_error
    last_week = list(history.values())[-7:]
    assert found.impressions.tolist() == [100, 100, 100, 100, 100, 8000, np.mean(last_week)]


def test_a_targeting_on_a_surface_grows_with_it_whatever_else_it_names(
    complete_world: World,
) -> None:
    supply = {name: {**by_day} for name, by_day in complete_world.tables.supply.items()}
    for back, day in enumerate(sorted(supply["reels"], reverse=True)):
        supply["reels"][day] *= 0.97**back
    forecaster = replace(
        complete_world.forecaster, tables=replace(complete_world.tables, supply=supply)
    )
    window = complete_world.tables.window

    def growth_of(text: str) -> float:
        targeting = parse_targeting(text, complete_world.tables.domain)
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


def test_a_flight_begins_after_the_logs_also_if_their_last_days_are_not_scored(
    complete_world: World,
) -> None:
    tables = complete_world.tables
    last = tables.window[-1]
    supply = {
        name: {**days, **dict.fromkeys(days_after(last, 3), 1000.0)}
        for name, days in tables.supply.items()
    }
    later = replace(complete_world.forecaster, tables=replace(tables, supply=supply))
    forecast = asyncio.run(later.forecast(ForecastRequest()))
    assert forecast.first_day == last + timedelta(days=4)
    request = ForecastRequest(first_day=last + timedelta(days=3), last_day=forecast.last_day)
    with pytest.raises(UserError, match="the logs already have it"):
        asyncio.run(later.forecast(request))
