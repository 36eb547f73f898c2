"""Budgets of campaigns by marginal return: the most expected value for a total spend.

    maximize    sum_c value_c w_c conversions_c(spend_c)
    subject to  sum_c spend_c = total,  low_c <= spend_c <= high_c

`w` lowers what is uncertain: conversions are taken `risk` standard deviations below their mean.
Curves are concave, so that one price per unit of spend (the marginal return) decides all campaigns:
spend_c = sqrt(value_c A_c k_c / price) - k_c within its limits, k the spend of half saturation.

C campaigns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from etl.array_types import Float64
from etl.errors import UserError
from ranking.roi.curves import ResponseCurves

BISECTIONS = 200
NORMAL_95 = 1.959964  # standard errors on each side of a 95 % interval


@dataclass(frozen=True)
class BudgetLimits:
    """What a plan may do: a total daily spend, and limits of each campaign (C)."""

    total: float
    low: Float64
    high: Float64

    def require_feasible(self, campaigns: Sequence[str]) -> None:
        """Raises UserError unless some plan is within the limits."""
        for name, low, high in zip(campaigns, self.low, self.high, strict=True):
            if low > high:
                raise UserError(
                    f"campaign {name} may spend at least {low:,.2f} and at most {high:,.2f} a day: "
                    "change its minimum or maximum, or allow a larger step"
                )
        if not self.low.sum() <= self.total * (1 + 1e-9):
            raise UserError(
                f"the budget is {self.total:,.2f} a day, but minimum spends and the largest step "
                f"down need {self.low.sum():,.2f}: raise the budget, or allow a larger step"
            )
        if not self.high.sum() >= self.total * (1 - 1e-9):
            raise UserError(
                f"the budget is {self.total:,.2f} a day, but campaigns may spend "
                f"{self.high.sum():,.2f} at most: lower the budget, or allow a larger step"
            )


def step_limits(
    total: float, current: Float64, max_step: float, minimum: Float64, maximum: Float64
) -> BudgetLimits:
    """Limits of a plan that changes no campaign by more than a share `max_step` of its spend.

    A minimum above the largest step up makes them contradictory, which a plan refuses.
    """
    low = np.maximum(minimum, current * (1 - max_step))
    high = np.minimum(maximum, current * (1 + max_step))
    return BudgetLimits(total, low, high)


@dataclass(frozen=True)
class BudgetPlan:
    """Daily spends (C), and the expected value (C) at the current and the planned spend.

    `value_low` and `value_high` are the 95 % interval of the value at the planned spend, from the
    errors of the curves and of the value of a conversion,
    `marginal_before` and `marginal_after` the value of the next unit of spend.
    """

    spend: Float64
    value_before: Float64
    value_after: Float64
    value_low: Float64
    value_high: Float64
    marginal_before: Float64
    marginal_after: Float64


def plan_budgets(
    curves: ResponseCurves,
    value_per_conversion: Float64,
    current: Float64,
    limits: BudgetLimits,
    risk: float = 0.0,
    drawn: ResponseCurves | None = None,
    value_deviation: Float64 | float = 0.0,
) -> BudgetPlan:
    """The plan with the most value within the limits.

    A campaign whose conversions have no positive value gets its minimum spend.
    `value_deviation` (C) is the standard error of the log of the value of a conversion.
    With `drawn` curves (Thompson sampling) they decide the spends; values are by `curves`.

    Raises:
        UserError: No plan is within the limits, or no campaign's conversions are worth anything.
    """
    if not (value_per_conversion > 0).any():
        raise UserError(
            "no campaign's conversions are worth anything, so that no plan is better than another: "
            "check the columns value and incremental_share"
        )
    limits.require_feasible(curves.campaigns)
    _, deviation = curves.log_conversions(current)
    # Only ratios of values matter: relative to the surest campaign, not all of them underflow.
    surest = deviation[value_per_conversion > 0].min()
    adjusted_value = value_per_conversion * np.exp(-risk * np.maximum(deviation - surest, 0))
    spend = _allocate(drawn or curves, adjusted_value, limits)
    log_mean, deviation = curves.log_conversions(spend)
    error = NORMAL_95 * np.hypot(deviation, value_deviation)
    low, high = np.exp(log_mean - error), np.exp(log_mean + error)

    def value(spent: Float64) -> Float64:
        return np.asarray(value_per_conversion * np.exp(curves.log_conversions(spent)[0]))

    return BudgetPlan(
        spend,
        value(current),
        value(spend),
        value_per_conversion * low,
        value_per_conversion * high,
        marginal_value(curves, value_per_conversion, current),
        marginal_value(curves, value_per_conversion, spend),
    )


def marginal_value(
    curves: ResponseCurves, value_per_conversion: Float64, spend: Float64
) -> Float64:
    """Value (C) of the next unit of spend."""
    largest, half = saturation(curves)
    return np.asarray(value_per_conversion * largest * half / (spend + half) ** 2)


def saturation(curves: ResponseCurves) -> tuple[Float64, Float64]:
    """The most conversions (C) a day, and the spend (C) at which there are half of them."""
    level, log_half_saturation = curves.mean.T
    half = curves.reference * np.exp(log_half_saturation)
    largest = np.asarray(np.exp(level) * (curves.reference + half) / curves.reference)
    return largest, half


def _allocate(curves: ResponseCurves, adjusted_value: Float64, limits: BudgetLimits) -> Float64:
    """Spends (C) that are optimal for one price, found by bisection on its log."""
    largest, half = saturation(curves)
    positive_value = np.maximum(adjusted_value, 0.0)

    has_value = positive_value > 0
    log_scale = np.full(len(half), -np.inf)
    log_scale[has_value] = np.log((positive_value * largest * half)[has_value])

    def spend_at(log_price: float) -> Float64:
        wanted = np.exp(np.minimum((log_scale - log_price) / 2, 700)) - half
        return np.asarray(np.clip(wanted, limits.low, limits.high))

    marginal = np.log((positive_value * largest / half)[has_value])
    low, high = float(marginal.min()) - 60, float(marginal.max()) + 60
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if spend_at(middle).sum() > limits.total:
            low = middle
        else:
            high = middle
    spend = spend_at(high)
    # What bisection leaves over goes to campaigns that may spend more.
    left, unused = limits.total - spend.sum(), limits.high - spend
    return np.asarray(spend + unused * (left / unused.sum() if unused.sum() > 0 else 0.0))


def explain(name: str, plan: BudgetPlan, current: Float64, position: int) -> str:
    """One sentence with the numbers behind a campaign's new budget."""
    before, after = float(current[position]), float(plan.spend[position])
    direction = "raise" if after > before else "lower"
    if np.isclose(before, after, rtol=1e-3):
        direction = "keep"
    return (
        f"{direction} {name} from {before:,.2f} to {after:,.2f} a day: the next unit of spend "
        f"returns {plan.marginal_before[position]:.2f} now and {plan.marginal_after[position]:.2f} "
        f"then; expected value {plan.value_before[position]:,.2f} to "
        f"{plan.value_after[position]:,.2f} (95 % {plan.value_low[position]:,.2f} to "
        f"{plan.value_high[position]:,.2f})"
    )
