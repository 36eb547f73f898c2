"""What a plan may bring: values and conversions of curves drawn from their posterior.

C campaigns, d draws.
"""

from dataclasses import dataclass

import numpy as np

from etl.array_types import Float64
from ranking.roi.curves import ResponseCurves

DRAWS = 2000
PERCENTILES = 5, 50, 95


@dataclass(frozen=True)
class PlanSimulation:
    """A plan against the current budgets, in draws.

    Attributes:
        gains: Expected daily value (d, C) of the plan less that of the current budgets.
        total_gains: Gain (d) of all campaigns, as a share of the value of the current budgets.
        conversions: Conversions (d, C) of a day at the planned spend.
    """

    gains: Float64
    total_gains: Float64
    conversions: Float64

    @property
    def loss_chance(self) -> float:
        """The share of draws in which the plan has less value than the current budgets."""
        return float((self.total_gains < 0).mean())

    def total_percentiles(self) -> Float64:
        """PERCENTILES (3) of the total gain."""
        return np.percentile(self.total_gains, PERCENTILES)

    def columns(self) -> dict[str, Float64]:
        """PERCENTILES (C) of gains and conversions, such as `gain_p5`, by campaign."""
        return {
            f"{name}_p{percentile}": np.asarray(np.percentile(draws, percentile, axis=0))
            for name, draws in (("gain", self.gains), ("conversions", self.conversions))
            for percentile in PERCENTILES
        }


def simulate_plan(
    curves: ResponseCurves,
    value_per_conversion: Float64,
    value_deviation: Float64,
    current: Float64,
    planned: Float64,
    rng: np.random.Generator,
) -> PlanSimulation:
    """Draw curves and values of a conversion, and the conversions of a day.

    Args:
        curves: The posterior.
        value_per_conversion: Value (C) of a conversion.
        value_deviation: Standard error (C) of the log of it.
        current: Present daily spend (C).
        planned: Planned daily spend (C).
        rng: Source of the draws.
    """
    before, after, conversions = (np.zeros((DRAWS, len(current))) for _ in range(3))
    for d in range(DRAWS):
        drawn = curves.draw(rng)
        value = value_per_conversion * np.exp(value_deviation * rng.standard_normal(len(current)))
        expected = np.exp(drawn.log_conversions(planned)[0])
        before[d] = value * np.exp(drawn.log_conversions(current)[0])
        after[d] = value * expected
        conversions[d] = _draw_conversions(expected, curves.dispersion, rng)
    return PlanSimulation(after - before, after.sum(1) / before.sum(1) - 1, conversions)


def _draw_conversions(expected: Float64, dispersion: float, rng: np.random.Generator) -> Float64:
    """Counts (C) with a variance of `dispersion` times that of a Poisson (gamma mixture)."""
    expected = np.minimum(expected, 1e15)  # of which a Poisson can still be drawn
    excess = dispersion - 1
    rate = rng.gamma(expected / excess, excess) if excess > 1e-6 else expected
    return np.asarray(rng.poisson(rate), dtype=np.float64)
