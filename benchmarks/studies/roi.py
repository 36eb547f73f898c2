"""`gemline bench roi`: response curves and plans on simulated campaigns with known curves.

Campaigns of five budget scales, four verticals and three surfaces; conversions saturate, some
sooner than the model's curve does. Each week a plan sets daily budgets, which then vary by chance
as pacing does. Curves and values per conversion are learned from the campaigns' days, as
`gemline roi` learns them; plans are judged by the true ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from statistics import mean
from typing import TYPE_CHECKING, Annotated

import tyro
from pydantic import Field

from benchmarks.harness import BenchmarkResult
from etl.spec.base import StrictModel

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from etl.array_types import Float64, Int64
    from ranking.roi.campaign_days import CampaignTable
    from ranking.roi.curves import CampaignDays

BUDGETS = (30, 300, 3_000, 30_000, 300_000)  # daily: a thousand to ten million a month
PER_SCALE, WEEKS, DAYS = 12, 6, 7
MAX_STEP, SPREAD = 0.5, 0.3
SLOPES = (0.8, 1.3)  # of the true Hill curves; the model has 1
COST_DEVIATION = 0.3  # of the log of campaigns' costs per conversion within their groups
LOG_HALF_SATURATION = (0.5, 0.5)  # mean and standard deviation
VALUE_SHAPE = 2.0  # of the gamma distribution of a conversion's value
GROUPS = ("vertical", "surface")
FIRST_DAY = date(2026, 1, 1)
GOALS = {
    "value_gain_equal_split": ">= 1.10",
    "value_gain_last_week": ">= 1.05",
    "share_of_oracle": ">= 0.9",
    "small_budget_error": "<= 0.7",
    "interval_coverage": "0.9 to 0.97",
    "value_calibration": "within 0.03 of 1",
}


class RoiArgs(StrictModel):
    """Arguments of the benchmark."""

    worlds: int = Field(default=20, ge=2)
    as_json: Annotated[bool, tyro.conf.arg(name="json", help="one line of JSON last")] = False


@dataclass(frozen=True)
class Market:
    """Campaigns (C) whose conversions by spend are known: largest r^slope / (r^slope + k)."""

    rng: "np.random.Generator"
    vertical: "Int64"
    surface: "Int64"
    budget: "Float64"
    half_saturation: "Float64"
    slope: "Float64"
    conversions_at_budget: "Float64"
    group_conversions: "Float64"  # at the budget, of a campaign with the cost of its groups
    value: "Float64"

    @classmethod
    def draw(cls, seed: int) -> "Market":
        """A market; costs per conversion depend on vertical, surface and the campaign itself."""
        import numpy as np

        rng = np.random.default_rng(seed)
        scale = np.repeat(BUDGETS, PER_SCALE)
        count = len(scale)
        vertical, surface = rng.integers(0, 4, count), rng.integers(0, 3, count)
        budget = scale * np.exp(0.3 * rng.standard_normal(count))
        group_cost = 10 * np.exp(
            0.5 * rng.standard_normal(4)[vertical] + 0.3 * rng.standard_normal(3)[surface]
        )
        cost = group_cost * np.exp(COST_DEVIATION * rng.standard_normal(count))
        value = np.exp(np.log(15) + 0.4 * rng.standard_normal(4)[vertical])
        value *= np.exp(0.2 * rng.standard_normal(count))
        middle, deviation = LOG_HALF_SATURATION
        half_saturation = np.exp(middle + deviation * rng.standard_normal(count))
        slope = rng.uniform(*SLOPES, count)
        at_budget, of_groups = budget / cost, budget / group_cost
        return cls(
            rng, vertical, surface, budget, half_saturation, slope, at_budget, of_groups, value
        )

    def conversions(self, spend: "Float64") -> "Float64":
        """Expected daily conversions (C)."""
        ratio = (spend / self.budget) ** self.slope
        return self.conversions_at_budget * saturating(ratio, self.half_saturation)

    def expected_value(self, spend: "Float64") -> float:
        """Expected daily value of all campaigns."""
        return float((self.value * self.conversions(spend)).sum())

    def week(self, number: int, spend: "Float64") -> "pa.Table":
        """The campaigns' days of a week, whose daily spends vary around those that were planned."""
        import numpy as np
        import pyarrow as pa

        count = len(spend)
        spends = spend[:, None] * np.exp(SPREAD * self.rng.standard_normal((count, DAYS)))
        expected = np.stack([self.conversions(spends[:, day]) for day in range(DAYS)], 1)
        conversions = self.rng.poisson(expected).ravel().astype(float)
        value = np.repeat(self.value, DAYS) * self.rng.gamma(VALUE_SHAPE * conversions)
        days = [FIRST_DAY + timedelta(days=DAYS * number + day) for day in range(DAYS)]
        columns = {
            "campaign": np.repeat([f"c{c:02d}" for c in range(count)], DAYS),
            "vertical": np.repeat(self.vertical.astype(str), DAYS),
            "surface": np.repeat(self.surface.astype(str), DAYS),
            "day": days * count,
            "spend": spends.ravel(),
            "conversions": conversions,
            "value": value / VALUE_SHAPE,
        }
        return pa.table(columns)

    def best_spend(self, total: float, low: "Float64", high: "Float64") -> "Float64":
        """The spend with the most expected value, by a price on the true marginal values."""
        import numpy as np

        grid = np.geomspace(low, high, 400)  # (400, C)
        value = self.value * np.stack([self.conversions(row) for row in grid])
        prices = np.geomspace(1e-4, 1e4, 4000)
        for price in prices:
            spend = grid[(value - price * grid).argmax(0), np.arange(len(low))]
            if spend.sum() <= total:
                return np.asarray(spend * total / spend.sum())
        return np.asarray(low)


def saturating(ratio: "Float64", half_saturation: "Float64") -> "Float64":
    """Conversions over those at the budget, where the ratio is 1."""
    return ratio * (1 + half_saturation) / (ratio + half_saturation)


def bench_roi(args: RoiArgs) -> None:
    """Errors of curves in the first week, and the value of plans over WEEKS weeks."""
    result = BenchmarkResult("Return on spend", ("figure", "value", "goal"))
    measured = [measure_market(seed) for seed in range(args.worlds)]
    means = {name: mean(row[name] for row in measured) for name in measured[0]}
    alone = means.pop("error_alone")
    means["small_budget_error"] = means.pop("error_shared") / alone
    means["small_budget_error_limit"] = means.pop("error_limit") / alone
    for name in (*GOALS, "small_budget_error_limit"):
        result.record(name, means[name], "")
        result.rows.append((name, f"{means[name]:.3f}", GOALS.get(name, "")))
    result.show(args.as_json)


def measure_market(seed: int) -> Mapping[str, float]:
    """The figures of one market."""
    import numpy as np

    from ranking.roi.curves import fit_curves
    from ranking.roi.plan import plan_budgets, step_limits

    market = Market.draw(seed)
    total, current = float(market.budget.sum()), market.budget
    weeks = [market.week(0, current)]
    figures = dict(first_week_errors(market, joined(weeks).days))
    low, high = 0.1 * market.budget, 10 * market.budget
    for number in range(1, WEEKS + 1):
        known = joined(weeks)
        limits = step_limits(total, current, MAX_STEP, low, high)
        curves = fit_curves(known.days)
        current = plan_budgets(curves, known.incremental_value, current, limits).spend
        weeks.append(market.week(number, current))
    known = joined(weeks)
    conversions = np.exp(fit_curves(known.days).log_conversions(current)[0])
    predicted = float((known.incremental_value * conversions).sum())
    value = market.expected_value(current)
    count = len(current)
    best = market.best_spend(total, low, high)
    return figures | {
        "value_gain_equal_split": value / market.expected_value(np.full(count, total / count)),
        "value_gain_last_week": value / market.expected_value(market.budget),
        "share_of_oracle": value / market.expected_value(best),
        "value_calibration": predicted / value,
    }


def first_week_errors(market: Market, week: "CampaignDays") -> Mapping[str, float]:
    """Errors of the log of conversions of the smallest budgets, and coverage of all intervals."""
    import numpy as np

    from ranking.roi.curves import fit_curves

    shared, alone = fit_curves(week), fit_curves(week, shared=False)
    small = np.arange(len(market.budget)) < PER_SCALE
    known_groups = GroupPosterior(market, week)
    errors: dict[str, list[float]] = {"shared": [], "alone": [], "limit": []}
    covered = []
    for factor in (0.7, 1.0, 1.5):
        spend = factor * market.budget
        truth = market.conversions(spend)
        low, high = shared.interval(spend)
        covered.append(float(((low <= truth) & (truth <= high)).mean()))
        predictions = {
            "shared": shared.log_conversions(spend)[0],
            "alone": alone.log_conversions(spend)[0],
            "limit": known_groups.log_conversions(factor),
        }
        for name, predicted in predictions.items():
            error = np.abs(predicted - np.log(truth))
            errors[name].append(float(error[small].mean()))
    averages = {f"error_{name}": mean(found) for name, found in errors.items()}
    return averages | {"interval_coverage": mean(covered)}


class GroupPosterior:
    """What can be known of campaigns after some days if all other campaigns were known exactly.

    The cost of its groups and how campaigns vary within them are given; a campaign's own cost,
    half-saturation and slope have their exact posterior, on a grid (G).
    """

    def __init__(self, market: Market, days: "CampaignDays") -> None:
        """Weigh the points of the grid by the days of each campaign."""
        import numpy as np

        normal, slopes = np.linspace(-3.5, 3.5, 29), np.linspace(*SLOPES, 9)
        cost, half, slope = (x.ravel() for x in np.meshgrid(normal, normal, slopes))
        self.log_level = -COST_DEVIATION * cost
        middle, deviation = LOG_HALF_SATURATION
        self.half_saturation, self.slope = np.exp(middle + deviation * half), slope
        self.log_group = np.log(market.group_conversions)
        log_prior = -(cost**2 + half**2) / 2
        ratio = days.spend / market.budget[days.campaign]
        posterior = np.tile(log_prior, (len(market.budget), 1))
        for day, campaign in enumerate(days.campaign):
            log_rate = self.log_group[campaign] + self._log_curve(ratio[day])
            posterior[campaign] += days.conversions[day] * log_rate - np.exp(log_rate)
        weights = np.exp(posterior - posterior.max(1, keepdims=True))
        self.weights = weights / weights.sum(1, keepdims=True)  # (C, G)

    def log_conversions(self, factor: float) -> "Float64":
        """Posterior mean (C) of the log of conversions at a multiple of the budget."""
        expected: Float64 = self.weights @ self._log_curve(factor)
        return self.log_group + expected

    def _log_curve(self, ratio: float) -> "Float64":
        import numpy as np

        return self.log_level + np.log(saturating(ratio**self.slope, self.half_saturation))


def joined(weeks: "list[pa.Table]") -> "CampaignTable":
    """What is known of the campaigns after several weeks."""
    import pyarrow as pa

    from ranking.roi.campaign_days import campaign_table

    return campaign_table("simulated weeks", pa.concat_tables(weeks), GROUPS, "USD")
