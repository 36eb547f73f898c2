"""What sums over the sample mean for a segment in a flight: estimates, with noise that hides users.

The noise of an answer is drawn by the segment, the quantity and what of the sample is counted: the
same answer is never drawn twice, and different ones share no factor that would divide out. What a
budget leaves has the noise of what would be won without it, so that no sweep of budgets averages
the noise away. A volume is changed by up to the share of as many users, or of the heaviest sampled
one if that is more, so that a user with many impressions is hidden too. Numbers of users and
impressions are whole, others are rounded to about the share of a user. How wide the noise makes an
interval depends on the number of users as it is answered, so that no interval reveals the count.
"""

import hashlib
import math
from dataclasses import dataclass

from ranking.forecast.schemas import Interval
from ranking.forecast.shard import IMPRESSIONS, SPEND, USERS
from ranking.forecast.sums import (
    Z95,
    Estimate,
    SampleSums,
    gamma_estimate,
    students_t_quantile,
)

NOISE_USERS = 5.0  # the largest change of a number of users, which hides single ones
NOISE_SHARE = 0.25  # of `min_users`, if that is less


@dataclass(frozen=True)
class SegmentSize:
    """Users and impressions of a segment in the window."""

    users: Estimate
    impressions: Estimate


@dataclass(frozen=True)
class SupplyGrowth:
    """The supply of a flight over that of the days of the window that stand for it."""

    ratio: float
    relative_error: float
    is_backtested: bool


@dataclass(frozen=True)
class NoiseSource:
    """Draws the noise of a segment's answers.

    Attributes:
        segment: What the segment is, and of which build.
        max_users: The largest change, in users.
    """

    segment: str
    max_users: float

    def draw(self, quantity: str, key: int, total: float, largest: float) -> float:
        """A noise factor that hides single users: answers with and without one differ by noise.

        Args:
            quantity: What is answered.
            key: A hash of the sampled users that are counted.
            total: Their total of the quantity.
            largest: The largest relative change.
        """
        # Digits that depend on the number of shards are left out.
        text = f"{self.segment} {quantity} {key} {total:.6g}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        uniform = int.from_bytes(digest) / 2**64 * 2.0 - 1.0
        return 1.0 + largest * uniform

    def is_reportable(self, users_with_noise: float, min_users: int) -> bool:
        """Whether a number of users with its noise is that of `min_users` users for certain."""
        return users_with_noise >= min_users + self.max_users

    def relative_variance(self, answered_users: float) -> float:
        """The variance of the factor, by the number of users as it is answered.

        That of the heaviest user is left out: the width of an interval would reveal this user.
        """
        return (self.max_users / answered_users) ** 2 / 3.0


@dataclass(frozen=True)
class SampleExpansion:
    """Turns sums over the sample into estimates for the segment in the flight."""

    size: SegmentSize
    in_window: SampleSums
    in_flight: SampleSums
    growth: SupplyGrowth
    noise: NoiseSource

    @property
    def users_per_sampled(self) -> float:
        """Users of the segment over those that the sample estimates."""
        return self.size.users.value / max(float(self.in_window.totals[USERS]), 1e-300)

    def count_users(self, sums: SampleSums) -> float:
        """The users that sums count, without noise."""
        return float(sums.totals[USERS]) * self.users_per_sampled

    def is_reportable(self, sums: SampleSums, counted: SampleSums, min_users: int) -> bool:
        """Whether sums count at least `min_users` users for certain, by their number with noise.

        The exact number must not decide: of two segments that differ by one user, one would be
        refused. `counted` are the sums that the noise is drawn by.
        """
        with_noise = self.count_users(sums) * self.noise_factor(USERS, counted)
        return self.noise.is_reportable(with_noise, min_users)

    def answered_users(self, counted: SampleSums) -> float:
        """The users that sums count, with their noise, as a whole number."""
        return max(round(self.count_users(counted) * self.noise_factor(USERS, counted)), 1.0)

    def users(self, sums: SampleSums, counted: SampleSums) -> Interval:
        """The users that sums count; `counted` are the sums that the noise is drawn by."""
        variance = _relative_variance(self.size.users)
        return self._interval(sums, USERS, self.users_per_sampled, variance, counted).rounded()

    def impressions(self, sums: SampleSums, counted: SampleSums) -> Interval:
        """The impressions that sums count; `counted` as in `users`."""
        return self.volume(sums, IMPRESSIONS, counted).rounded()

    def rounded_volume(self, sums: SampleSums, quantity: int, counted: SampleSums) -> Interval:
        """`volume` to a power of ten of about the share of a user."""
        found = self.volume(sums, quantity, counted)
        share = max(found.value / self.answered_users(counted), 1e-12)
        return found.rounded(-math.floor(math.log10(share)))

    def cost(self, value: float, sums: SampleSums, quantity: int, counted: SampleSums) -> Interval:
        """What an event costs, with its interval, in four digits.

        By the delta method, in which size and supply cancel, with the quantiles of Student's t: the
        variance of a ratio that few users make is itself uncertain.
        """
        spend, events = (max(float(sums.totals[of]), 1e-300) for of in (SPEND, quantity))
        variances, covariance = sums.variances(), sums.spend_covariances()[quantity]
        relative = variances[SPEND] / spend**2 + variances[quantity] / events**2
        relative = max(relative - 2.0 * covariance / (spend * events), 0.0)
        effective_users = spend**2 / max(float(variances[SPEND]), 1e-300)
        relative *= (students_t_quantile(effective_users - 1.0) / Z95) ** 2
        relative += 2.0 * self.noise.relative_variance(self.answered_users(counted))
        found = to_interval(gamma_estimate(value, relative * value**2))
        return found.rounded(3 - math.floor(math.log10(value))) if value > 0 else found

    def volume(self, sums: SampleSums, quantity: int, counted: SampleSums) -> Interval:
        """Impressions, spend or events: they grow with the supply of the flight."""
        factor = self.size.impressions.value / max(self.in_window.totals[IMPRESSIONS], 1e-300)
        variance = _relative_variance(self.size.impressions) + self.growth.relative_error**2
        return self._interval(sums, quantity, factor * self.growth.ratio, variance, counted)

    def _interval(
        self,
        sums: SampleSums,
        quantity: int,
        factor: float,
        size_variance: float,
        counted: SampleSums,
    ) -> Interval:
        """The estimate of a quantity; what it is per user or impression varies on its own."""
        of_noise = self.noise.relative_variance(self.answered_users(counted))
        relative = size_variance + _own_variance(sums, quantity, self.in_window) + of_noise
        mean = sums.totals[quantity] * factor * self.noise_factor(quantity, counted)
        return to_interval(gamma_estimate(mean, relative * mean**2))

    def noise_factor(self, quantity: int, counted: SampleSums) -> float:
        """What a quantity of the users that sums count is multiplied by."""
        largest = self.noise.max_users / max(self.count_users(counted), 1e-300)
        total = counted.totals[quantity]
        if quantity != USERS and total > 0:
            largest = max(largest, min(float(counted.largest[quantity] / total), 1.0))
        return self.noise.draw(str(quantity), counted.key, total, largest)


def _own_variance(sums: SampleSums, quantity: int, base: SampleSums) -> float:
    """The relative variance of a quantity per user or impression that the base sums."""
    per = USERS if quantity == USERS else IMPRESSIONS
    of_total, of_base = (
        float(found.variances()[of]) / max(float(found.totals[of]), 1e-300) ** 2
        for found, of in ((sums, quantity), (base, per))
    )
    return max(of_total - of_base, 0.0)


def _relative_variance(estimate: Estimate) -> float:
    """The squared relative standard deviation that an interval of 95 % stands for."""
    if estimate.value <= 0:
        return 0.0
    return ((estimate.high - estimate.low) / (2 * Z95 * estimate.value)) ** 2


def to_interval(estimate: Estimate) -> Interval:
    """An estimate as it is answered."""
    return Interval(value=estimate.value, low=estimate.low, high=estimate.high)
