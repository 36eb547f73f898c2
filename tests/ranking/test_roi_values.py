"""Values of conversions are shrunk, incremental where measured, and as uncertain as stated."""

from pathlib import Path

import numpy as np
import pytest

from etl.errors import UserError
from ranking.roi.campaign_days import read_campaign_days
from ranking.roi.plan import BudgetLimits, plan_budgets
from ranking.roi.value import value_per_conversion
from tests.ranking.campaigns import COUNT, market, some_curves, write_campaign_days


def test_value_per_conversion_is_shrunk_and_incremental_where_measured(tmp_path: Path) -> None:
    days, _, _ = market(3, days=4)
    value = days.conversions * np.where(days.campaign == 12, 50, 10)
    share = np.where(days.campaign == 5, 0.5, 1.0)
    file = write_campaign_days(tmp_path / "d.csv", days, value=value, incremental_share=share)
    table = read_campaign_days(file, ("vertical",), None)
    assert 40 < table.value_per_conversion[12] < 50  # many conversions of its own
    assert table.incremental_value[5] == pytest.approx(table.value_per_conversion[5] / 2)
    with pytest.raises(UserError, match="no such file"):
        read_campaign_days(tmp_path / "none.csv", (), None)


def test_days_without_conversions_yet_count_as_current_spend_but_not_for_curves(
    tmp_path: Path,
) -> None:
    """Budgets were halved three days ago, and no conversion of these days can have arrived."""
    days, _, _ = market(3, days=10)
    is_new = np.tile(np.arange(10) >= 7, COUNT)
    spend = np.where(is_new, 0.5, 1.0) * days.spend
    columns = {"spend": spend, "arrived": np.where(is_new, 0.0, 1.0)}
    columns["conversions"] = columns["value"] = np.where(is_new, 0.0, days.conversions)
    table = read_campaign_days(write_campaign_days(tmp_path / "d.csv", days, **columns), (), None)
    np.testing.assert_allclose(table.current, spend.reshape(COUNT, 10)[:, 3:].mean(1))
    assert len(table.days.spend) == 7 * COUNT and (table.days.arrived == 1).all()


@pytest.mark.parametrize("between", [0.0, 0.3, 1.0])
def test_intervals_of_the_value_of_a_conversion_cover_it(between: float) -> None:
    """Lognormal orders; campaigns of a few to some thousand conversions."""
    daily, num_days = np.repeat([0.5, 5, 50, 300], 10), 14
    campaign = np.repeat(np.arange(len(daily)), num_days)
    covered = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        true = 12 * np.exp(between * rng.standard_normal(len(daily)))
        conversions = rng.poisson(daily[campaign])
        orders = [rng.lognormal(-0.32, 0.8, n).sum() for n in conversions]
        mean, deviation = value_per_conversion(
            campaign, conversions.astype(float), true[campaign] * orders, len(daily)
        )
        covered.append(np.abs(np.log(true / mean)) < 1.96 * deviation)
    by_size = np.reshape(covered, (-1, 4, 10)).mean((0, 2))
    assert 0.92 <= np.mean(covered) <= 0.98 and by_size.min() > 0.88


def test_the_error_of_a_value_is_relative_to_its_own_campaign() -> None:
    """One that brings nothing beside one that brings 50 is not worth thousands by chance."""
    campaign, conversions = np.repeat([0, 1], 10), np.full(20, 1000.0)
    sums = np.random.default_rng(0).exponential(50, (20, 1000)).sum(1)
    for scale, largest in ((0.02, 0.1), (0.0, 1.5)):
        value = np.where(campaign == 0, scale, 1) * sums
        _, deviation = value_per_conversion(campaign, conversions, value, 2)
        assert deviation[0] < largest
        assert deviation[1] == pytest.approx(0.01, rel=0.2)  # of 10,000 exponential values


def test_an_uncertain_value_of_conversions_widens_the_intervals_of_a_plan() -> None:
    curves, value, current = some_curves(3)
    limits = BudgetLimits(current.sum(), 0.5 * current, 2 * current)
    certain = plan_budgets(curves, value, current, limits)
    plan = plan_budgets(curves, value, current, limits, value_deviation=np.full(COUNT, 0.2))
    np.testing.assert_allclose(plan.value_after, certain.value_after)
    errors = [np.log(p.value_high / p.value_low) / (2 * 1.959964) for p in (certain, plan)]
    np.testing.assert_allclose(errors[1] ** 2, errors[0] ** 2 + 0.04)
