"""Users and items of the simulation.

Users have attributes, interests and an activity, and share a taste space with items. Items are
organic posts, which exist during the whole run, and ads, active for a few days.
"""

from dataclasses import dataclass, replace
from typing import Self, cast

import numpy as np

from etl.array_types import Floats, Int64
from etl.simulator.arrays import RowBatch, draw_from_probabilities
from etl.simulator.config import (
    AGE_BANDS,
    COUNTRIES,
    DAY_MS,
    DEVICES,
    FORMATS,
    GOALS,
    SURFACES,
    TIERS,
    SimulatorConfig,
)

DIMENSIONS = 12
CREATIVE_WIDTH = 16
SURFACE_EMPHASIS_SPREAD = 0.5
MIN_CYCLE_DAYS = 1.5
MAX_CYCLE_DAYS = 6.0
PURCHASE_VALUE_SPREAD = 0.3


@dataclass(frozen=True)
class TasteSpace:
    """A latent space of D = DIMENSIONS; vectors have variance 1 per dimension.

    Attributes:
        emphasis: (surfaces, D) weight of each dimension on each surface.
        category: (categories, D) centers of the categories.
        age_band: (age bands, D) interests that users of an age band share.
        country: (countries, D) interests that users of a country share.
        period_ms: (categories,) time between two purchases of a user.
        price: (categories,) average value of a purchase.
        creative: (D, CREATIVE_WIDTH) map from latent vectors of items to their creatives.
    """

    emphasis: Floats
    category: Floats
    age_band: Floats
    country: Floats
    period_ms: Floats
    price: Floats
    creative: Floats

    @classmethod
    def draw(cls, categories: int, rng: np.random.Generator) -> Self:
        """Draw a space; the periods of its categories are spread over the allowed range."""
        emphasis = np.exp(
            SURFACE_EMPHASIS_SPREAD * standard_normal((len(SURFACES), DIMENSIONS), rng)
        )
        return cls(
            emphasis=emphasis / np.sqrt(np.mean(emphasis**2, axis=1, keepdims=True)),
            category=standard_normal((categories, DIMENSIONS), rng),
            age_band=standard_normal((len(AGE_BANDS), DIMENSIONS), rng),
            country=standard_normal((len(COUNTRIES), DIMENSIONS), rng),
            period_ms=DAY_MS
            * rng.permutation(np.linspace(MIN_CYCLE_DAYS, MAX_CYCLE_DAYS, categories)),
            price=np.exp(3 + 0.6 * rng.standard_normal(categories)),
            creative=standard_normal((DIMENSIONS, CREATIVE_WIDTH), rng) / np.sqrt(DIMENSIONS),
        )

    def affinity(self, interest: Floats, surface: Int64, latent: Floats) -> Floats:
        """How much users like items on surfaces, about N(0, 1) over random pairs.

        Shapes: interest (n, D), surface (n,), latent (n, k, D) -> (n, k).
        """
        weighted = interest * self.emphasis[surface]
        products = np.einsum("nd,nkd->nk", weighted, latent)
        return cast(Floats, products / np.sqrt(DIMENSIONS, dtype=np.float32))

    def purchase_values(self, category: Int64, rng: np.random.Generator) -> Floats:
        """(n,) value of one purchase in each of the categories."""
        spread = np.exp(PURCHASE_VALUE_SPREAD * rng.standard_normal(category.size))
        return np.round(self.price[category] * spread, 2)


def standard_normal(shape: tuple[int, ...], rng: np.random.Generator) -> Floats:
    """Standard normal draws in single precision."""
    return rng.standard_normal(shape, dtype=np.float32)


def mix_variance(common_share: float, common: Floats, own: Floats) -> Floats:
    """Weighted sum of variance 1 of two parts of variance 1; `common_share` is due to the first."""
    return np.float32(np.sqrt(common_share)) * common + np.float32(np.sqrt(1 - common_share)) * own


ATTRIBUTES = (AGE_BANDS, COUNTRIES, TIERS)
AGE_BAND, COUNTRY, TIER = range(3)
TIER_SHARES = np.array([[0.7, 0.22, 0.08]])
SURFACE_SHARES = np.array([0.55, 0.35, 0.10])
SURFACE_LOYALTY = 6.0  # concentration of the Dirichlet distribution around SURFACE_SHARES
ACTIVITY_SPREAD = 1.0  # sigma of the log-normal number of events
CLICKINESS_SPREAD = 0.5
INTEREST_AUTOCORRELATION = (
    0.985  # correlation of a user's own interests with those of the day before
)
PEER_VARIANCE_SHARE = 0.25  # share of the variance of interests due to age band and country
ATTRIBUTE_CHANGE_RATE = 0.01  # share of users with a changed attribute per day


@dataclass(frozen=True)
class Users(RowBatch):
    """One row per user, as of one day.

    Attributes:
        user: (n,) id.
        attributes: (n, 3) positions in ATTRIBUTES: age band, country, tier.
        changed_ms: (n,) when an attribute last changed, epoch ms.
        account_age_days: (n,) age of the account on the first day.
        own_interest: (n, D) the part of the interests that is not shared with peers.
        surfaces: (n, surfaces) share of sessions on each surface.
        activity: (n,) expected events over the run.
        clickiness: (n,) logit added to that of a click.
        device: (n,) primary device.
    """

    user: Int64
    attributes: Int64
    changed_ms: Int64
    account_age_days: Int64
    own_interest: Floats
    surfaces: Floats
    activity: Floats
    clickiness: Floats
    device: Int64

    @classmethod
    def draw(cls, config: SimulatorConfig, rng: np.random.Generator) -> Self:
        """Draw all users, as of the first day."""
        n = config.users
        attributes = [
            rng.integers(len(AGE_BANDS), size=n),
            rng.integers(len(COUNTRIES), size=n),
            draw_from_probabilities(np.repeat(TIER_SHARES, n, axis=0), rng),
        ]
        return cls(
            user=np.arange(n),
            attributes=np.stack(attributes, axis=1),
            changed_ms=np.full(n, config.start_ms),
            account_age_days=rng.geometric(1 / 400, size=n),
            own_interest=standard_normal((n, DIMENSIONS), rng),
            surfaces=rng.dirichlet(SURFACE_LOYALTY * SURFACE_SHARES, size=n),
            activity=_activity(config, rng),
            clickiness=CLICKINESS_SPREAD * standard_normal((n,), rng),
            device=rng.integers(len(DEVICES), size=n),
        )

    def interest(self, taste: TasteSpace) -> Floats:
        """(n, D) interests: those shared by the age band and country, and the user's own."""
        age = taste.age_band[self.attributes[:, AGE_BAND]]
        country = taste.country[self.attributes[:, COUNTRY]]
        return mix_variance(PEER_VARIANCE_SHARE, mix_variance(0.6, age, country), self.own_interest)

    def category_affinity(self, taste: TasteSpace) -> Floats:
        """(n, categories) affinity with the centers of the categories, on any surface."""
        products = self.interest(taste) @ taste.category.T
        return cast(Floats, products / np.sqrt(DIMENSIONS, dtype=np.float32))

    def next_day(self, midnight_ms: int, rng: np.random.Generator) -> Self:
        """The same users a day later: interests drift, and one attribute of a few users changes."""
        n = len(self)
        rows = np.flatnonzero(rng.random(n) < ATTRIBUTE_CHANGE_RATE)
        attribute = rng.integers(len(ATTRIBUTES), size=rows.size)
        sizes = np.array([len(values) for values in ATTRIBUTES])[attribute]
        attributes, changed_ms = self.attributes.copy(), self.changed_ms.copy()
        attributes[rows, attribute] = (attributes[rows, attribute] + rng.integers(1, sizes)) % sizes
        changed_ms[rows] = midnight_ms + rng.integers(DAY_MS, size=rows.size)
        drifted = mix_variance(
            1 - INTEREST_AUTOCORRELATION**2,
            standard_normal((n, DIMENSIONS), rng),
            self.own_interest,
        )
        return replace(self, attributes=attributes, changed_ms=changed_ms, own_interest=drifted)


def _activity(config: SimulatorConfig, rng: np.random.Generator) -> Floats:
    """(n,) log-normal, capped below max_events_per_user and scaled to events_per_user_mean."""
    raw = np.exp(ACTIVITY_SPREAD * rng.standard_normal(config.users))
    cap, scale = 0.95 * config.max_events_per_user, 1.0
    for _ in range(100):
        scale *= config.events_per_user_mean / np.minimum(scale * raw, cap).mean()
    return np.minimum(scale * raw, cap)


CATEGORY_VARIANCE_SHARE = 0.65  # share of the variance of latent vectors due to the category
CREATIVE_NOISE = 0.5
MIN_AD_LIFETIME_DAYS, MAX_AD_LIFETIME_DAYS = 3, 7
ADVERTISER_SPREAD = 0.4
AD_SPREAD = 0.3
BID_BY_GOAL = np.array([0.02, 0.10, 0.80])  # per long view, click, conversion
BID_SPREAD = 0.5


@dataclass(frozen=True)
class Items(RowBatch):
    """One row per item, posts or ads.

    Attributes:
        item, category: (n,) ids.
        format: (n,) position in FORMATS.
        latent: (n, DIMENSIONS) vector in the taste space.
        creative: (n, CREATIVE_WIDTH) observed embedding, a noisy linear map of `latent`.
        created_ms: (n,) epoch ms, before `first_day`.
        first_day: (n,) first day of the run on which it can be shown.
    """

    item: Int64
    category: Int64
    format: Int64
    latent: Floats
    creative: Floats
    created_ms: Int64
    first_day: Int64


@dataclass(frozen=True)
class Ads(Items):
    """One row per ad.

    Attributes:
        advertiser: (n,) id.
        goal: (n,) position in GOALS.
        bid: (n,) money per event of the goal.
        quality: (n,) logit added to that of a click.
        trust: (n,) logit added to that of a conversion, one value per advertiser.
        last_day: (n,) last day of the run on which it can be shown.
    """

    advertiser: Int64
    goal: Int64
    bid: Floats
    quality: Floats
    trust: Floats
    last_day: Int64

    def active_on(self, day: int) -> Int64:
        """Rows of the ads that can be shown on a day."""
        return np.flatnonzero((self.first_day <= day) & (day <= self.last_day))


def draw_posts(config: SimulatorConfig, taste: TasteSpace, rng: np.random.Generator) -> Items:
    """The posts, all created before the run; post i is in category `i % categories`."""
    n = config.posts
    category = np.arange(n) % config.categories
    latent = _latent(taste, category, rng)
    return Items(
        item=np.arange(n),
        category=category,
        format=rng.integers(len(FORMATS), size=n),
        latent=latent,
        creative=_creative(taste, latent, rng),
        created_ms=config.start_ms - rng.integers(1, 30 * DAY_MS, size=n),
        first_day=np.zeros(n, np.int64),
    )


def draw_ads(config: SimulatorConfig, taste: TasteSpace, rng: np.random.Generator) -> Ads:
    """All ads of the run, each created on the day before its first.

    An advertiser has one category. Ads of the first day have been active for some days already.
    """
    arrivals = [config.ads_start] + [config.ads_per_day] * (config.days - 1)
    first_day = np.repeat(np.arange(config.days), arrivals)
    n = config.ads
    lifetime = rng.integers(MIN_AD_LIFETIME_DAYS, MAX_AD_LIFETIME_DAYS + 1, size=n)
    age = np.where(first_day == 0, rng.integers(lifetime), 0)
    advertiser = rng.integers(config.advertisers, size=n)
    reputation, trust = ADVERTISER_SPREAD * rng.standard_normal((2, config.advertisers))
    category = advertiser % config.categories
    goal = rng.integers(len(GOALS), size=n)
    latent = _latent(taste, category, rng)
    created_day_ms = config.start_ms + (first_day - age - 1) * DAY_MS
    return Ads(
        item=np.arange(n),
        category=category,
        format=rng.integers(len(FORMATS), size=n),
        latent=latent,
        creative=_creative(taste, latent, rng),
        created_ms=created_day_ms + rng.integers(DAY_MS, size=n),
        first_day=first_day,
        advertiser=advertiser,
        goal=goal,
        bid=BID_BY_GOAL[goal] * np.exp(BID_SPREAD * rng.standard_normal(n)),
        quality=reputation[advertiser] + AD_SPREAD * rng.standard_normal(n),
        trust=trust[advertiser],
        last_day=first_day - age + lifetime - 1,
    )


def _latent(taste: TasteSpace, category: Int64, rng: np.random.Generator) -> Floats:
    own = standard_normal((category.size, DIMENSIONS), rng)
    return mix_variance(CATEGORY_VARIANCE_SHARE, taste.category[category], own)


def _creative(taste: TasteSpace, latent: Floats, rng: np.random.Generator) -> Floats:
    noise = standard_normal((len(latent), CREATIVE_WIDTH), rng)
    return latent @ taste.creative + CREATIVE_NOISE * noise
