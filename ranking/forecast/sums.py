"""Sums over a sample of users, and what they estimate: Horvitz-Thompson with Poisson sampling.

A user u is in the sample with probability pi_u, independently of the others. For a quantity y:

    total     T  = sum y / pi
    variance  V  = sum (1 - pi) y^2 / pi^2 = sum y^2 / pi^2 - sum y^2 / pi

A shard of W that does not answer leaves a sample with probabilities pi (W - 1) / W, because users
are spread over the shards by a hash: the same formulas hold, with wider intervals. Covariances of
two quantities are estimated likewise, with y z in the place of y^2. Q quantities.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce

import numpy as np

from etl.array_types import Float64

Z95 = 1.959963984540054  # two-sided 95 % of a normal distribution


@dataclass(frozen=True)
class SampleSums:
    """Sums of quantities over the sampled users that match a targeting.

    Attributes:
        totals: sum y / pi (Q).
        squares: sum y^2 / pi^2 (Q).
        damped_squares: sum y^2 / pi (Q).
        spend_products: sum y s / pi^2 (Q), where s is the spend on a user; 0 without a campaign.
        damped_spend_products: sum y s / pi (Q).
        largest: The largest y of a user (Q).
        users: The number of sampled users.
        key: A hash of the set of these users.
        answered: The share of the shards that the sums are from.
        spend_curve: The spend at `ranking.forecast.shard.PARTICIPATIONS` (S), if a campaign has a
            frequency cap and a budget.
    """

    totals: Float64
    squares: Float64
    damped_squares: Float64
    spend_products: Float64
    damped_spend_products: Float64
    largest: Float64
    users: int
    key: int
    answered: float = 1.0
    spend_curve: Float64 = field(default_factory=lambda: np.zeros(0))

    def __add__(self, other: "SampleSums") -> "SampleSums":
        return SampleSums(
            self.totals + other.totals,
            self.squares + other.squares,
            self.damped_squares + other.damped_squares,
            self.spend_products + other.spend_products,
            self.damped_spend_products + other.damped_spend_products,
            np.maximum(self.largest, other.largest),
            self.users + other.users,
            self.key ^ other.key,
            spend_curve=self.spend_curve + other.spend_curve,
        )

    def variances(self) -> Float64:
        """The estimated variances (Q) of the totals."""
        return np.maximum(self.squares - self.damped_squares, 0.0)

    def spend_covariances(self) -> Float64:
        """The estimated covariances (Q) of the totals with the total spend."""
        return self.spend_products - self.damped_spend_products

    def weight(self, quantity: int) -> float:
        """The weight of a typical unit: the variance over the mean of a Poisson total."""
        total = self.totals[quantity]
        return float(self.squares[quantity] / total) if total > 0 else 0.0


def combine_shards(parts: Sequence[SampleSums], num_shards: int) -> SampleSums:
    """The sums of all shards, estimated from those that answered."""
    found = reduce(SampleSums.__add__, parts)
    ratio = num_shards / len(parts)
    return SampleSums(
        found.totals * ratio,
        found.squares * ratio**2,
        found.damped_squares * ratio,
        found.spend_products * ratio**2,
        found.damped_spend_products * ratio,
        found.largest,
        found.users,
        found.key,
        len(parts) / num_shards,
        found.spend_curve * ratio,
    )


@dataclass(frozen=True)
class Estimate:
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> "Estimate":
        """The estimate of a multiple."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True)
class Prior:
    """What a model expects of a total before the sample is seen, and the variance of its errors."""

    mean: float
    variance: float


def posterior(total: float, variance: float, weight: float, prior: Prior | None) -> Estimate:
    """A total given the sample, and a prior from a model if there is one.

    The total is n units of a Poisson count, each of `weight`: n = total^2 / variance. A gamma prior
    of the same mean and variance as the model's makes the posterior a gamma distribution.

    Args:
        total: The total that the sample estimates.
        variance: Its variance.
        weight: How much one more unit would add, if the variance is 0 because nothing matched.
        prior: The model's expectation; None where no model covers the targeting.
    """
    if prior and prior.variance <= 0:
        return Estimate(prior.mean, prior.mean, prior.mean)
    if total > 0 and variance <= 1e-12 * total**2:
        return Estimate(total, total, total)
    count = total**2 / variance if total > 0 else 0.0
    exposure = count / total if total > 0 else 1.0 / weight
    if prior is None or prior.mean <= 0:
        value = total
        low = gamma_quantile(count + 0.5, -Z95) / exposure
        high = gamma_quantile(count + 0.5, Z95) / exposure
        return Estimate(value, min(low, value), max(high, value))
    shape = prior.mean**2 / prior.variance + count
    rate = prior.mean / prior.variance + exposure
    return gamma_estimate(shape / rate, shape / rate**2)


def gamma_estimate(mean: float, variance: float) -> Estimate:
    """The mean and the central 95 % of a gamma distribution."""
    if mean <= 0 or variance <= 0:
        return Estimate(mean, mean, mean)
    shape, rate = mean**2 / variance, mean / variance
    return Estimate(mean, gamma_quantile(shape, -Z95) / rate, gamma_quantile(shape, Z95) / rate)


def gamma_quantile(shape: float, z: float) -> float:
    """The quantile of a gamma distribution of rate 1 at that of `z` in a normal distribution.

    By Wilson and Hilferty (1931): the cube root is nearly normal.
    """
    cube_root = max(1.0 - 1.0 / (9.0 * shape) + z / (3.0 * math.sqrt(shape)), 0.0)
    return shape * cube_root**3


def students_t_quantile(degrees_of_freedom: float) -> float:
    """The quantile of Student's t distribution at 97.5 %, of at least one degree of freedom.

    By the expansion of Cornish and Fisher (1938); 3 % too small at two degrees, 1 % at three.
    """
    z, inverse = Z95, 1.0 / max(degrees_of_freedom, 1.0)
    first = (z**3 + z) / 4.0
    second = (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0
    third = (3.0 * z**7 + 19.0 * z**5 + 17.0 * z**3 - 15.0 * z) / 384.0
    return z + first * inverse + second * inverse**2 + third * inverse**3
