"""What the oracle of the observable history believes: of items, users, ads and due purchases.

U users, D latent dimensions, K = D + 1 (clickiness is the last), n items or impressions.
"""

from dataclasses import dataclass

import numpy as np
from scipy.stats import norm

from etl.array_types import Bools, Float64, Int64
from etl.simulator import entities, world
from etl.simulator.config import SimulatorConfig
from etl.simulator.entities import DIMENSIONS, Items, TasteSpace


@dataclass(frozen=True)
class ItemPosterior:
    """Means (n, D) of items' latent vectors given category and creative, and their variance.

    `residual` is the mean less the center of the category, and `spread` its variance.
    """

    mean: Float64
    residual: Float64
    variance: float
    spread: float

    @classmethod
    def of(cls, items: Items, taste: TasteSpace) -> "ItemPosterior":
        """The posterior of a linear Gaussian model."""
        own = 1 - entities.CATEGORY_VARIANCE_SHARE
        center = entities.CATEGORY_VARIANCE_SHARE**0.5 * taste.category[items.category]
        noise = entities.CREATIVE_NOISE**2
        precision = np.eye(DIMENSIONS) / own + taste.creative @ taste.creative.T / noise
        gain = taste.creative.T @ np.linalg.inv(precision) / noise
        residual = (items.creative - center @ taste.creative) @ gain
        variance = float(np.trace(np.linalg.inv(precision))) / DIMENSIONS
        return cls(center + residual, residual, variance, own - variance)


@dataclass
class Beliefs:
    """Gaussians: `mean` (U, K) and `covariance` (U, K, K) of users; appeal of ads as two effects.

    `ad` and `advertiser` are means, `ad_precision` and `advertiser_precision` their precisions.
    """

    mean: Float64
    covariance: Float64
    ad: Float64
    ad_precision: Float64
    advertiser: Float64
    advertiser_precision: Float64

    @classmethod
    def prior(cls, config: SimulatorConfig) -> "Beliefs":
        """Before the first day."""
        k = DIMENSIONS + 1
        covariance = np.eye(k)
        covariance[-1, -1] = entities.CLICKINESS_SPREAD**2
        return cls(
            np.zeros((config.users, k)),
            np.repeat(covariance[None], config.users, 0),
            np.zeros(config.ads),
            np.full(config.ads, entities.AD_SPREAD**-2),
            np.zeros(config.advertisers),
            np.full(config.advertisers, entities.ADVERTISER_SPREAD**-2),
        )

    def drift(self) -> None:
        """A day passes: interests move towards zero, and become less certain."""
        kept = np.full(DIMENSIONS + 1, entities.INTEREST_AUTOCORRELATION)
        kept[-1] = 1.0
        self.mean = self.mean * kept
        self.covariance = self.covariance * np.outer(kept, kept) + np.diag(1 - kept**2)

    def update_users(self, user: Int64, gradient: Float64, information: Float64) -> None:
        """A Newton step of some events (n) of users, from gradients and information matrices."""
        users, first = np.unique(user, return_index=True)
        total = np.add.reduceat(gradient, first)
        precision = np.linalg.inv(self.covariance[users]) + np.add.reduceat(information, first)
        self.covariance[users] = np.linalg.inv(precision)
        self.mean[users] += np.einsum("ukl,ul->uk", self.covariance[users], total)

    def update_appeal(
        self, ad: Int64, advertiser: Int64, surprise: Float64, weight: Float64
    ) -> None:
        """A Newton step of the appeal from clicks less their probabilities, and p (1 - p).

        Ads explain what their advertisers do not.
        """
        n = len(self.advertiser)
        self.advertiser_precision += np.bincount(advertiser, weight, n)
        step = np.bincount(advertiser, surprise, n) / self.advertiser_precision
        self.advertiser += step
        n, unexplained = len(self.ad), surprise - weight * step[advertiser]
        self.ad_precision += np.bincount(ad, weight, n)
        self.ad += np.bincount(ad, unexplained, n) / self.ad_precision


@dataclass(frozen=True)
class Need:
    """The probability (n) that a purchase is due, and the need (n) if it is not."""

    due: Float64
    otherwise: Float64

    @classmethod
    def of(cls, elapsed: Float64, has_bought: Bools, first_due: Float64) -> "Need":
        """From the periods since the last purchase; `first_due` where there was none."""
        x = np.where(has_bought, elapsed, 0.5)
        waited = norm.cdf((x - 1) / world.INTERVAL_JITTER)
        soon = norm.cdf((x + world.NEED_LEAD_PERIODS - 1) / world.INTERVAL_JITTER)
        due = (soon - waited) / np.maximum(1 - waited, 1e-9)
        due = np.where(x <= world.NEED_TAIL_PERIODS, 1.0, np.clip(due, 0, 1))
        is_satiated = (x > world.NEED_TAIL_PERIODS) & (x <= world.SATIATION_PERIODS)
        return cls(
            np.where(has_bought, due, first_due),
            np.where(has_bought & is_satiated, -world.SATIATION_PENALTY, 0.0),
        )


def first_purchase_is_due(elapsed: Float64, is_cyclic: float) -> Float64:
    """The probability (n) that a category's first purchase is due, after periods without one.

    It is at a uniform time of the first period, if the category is one of the user's.
    """
    remaining = np.clip(1 - elapsed, 0, 1)
    is_cyclic_still = is_cyclic * remaining / (is_cyclic * remaining + 1 - is_cyclic)
    lead = world.NEED_LEAD_PERIODS
    return np.asarray(is_cyclic_still * np.minimum(1, lead / np.maximum(remaining, lead)))
