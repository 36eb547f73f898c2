"""Items: organic posts, which exist during the whole run, and ads, active for a few days."""

from dataclasses import dataclass

import numpy as np

from etl.simulator.arrays import Floats, Ints, RowBatch
from etl.simulator.config import DAY_MS, FORMATS, GOALS, SimulatorConfig
from etl.simulator.users import (
    CREATIVE_WIDTH,
    DIMENSIONS,
    TasteSpace,
    mix_variance,
    standard_normal,
)

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

    item: Ints
    category: Ints
    format: Ints
    latent: Floats
    creative: Floats
    created_ms: Ints
    first_day: Ints


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

    advertiser: Ints
    goal: Ints
    bid: Floats
    quality: Floats
    trust: Floats
    last_day: Ints

    def active_on(self, day: int) -> Ints:
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


def _latent(taste: TasteSpace, category: Ints, rng: np.random.Generator) -> Floats:
    own = standard_normal((category.size, DIMENSIONS), rng)
    return mix_variance(CATEGORY_VARIANCE_SHARE, taste.category[category], own)


def _creative(taste: TasteSpace, latent: Floats, rng: np.random.Generator) -> Floats:
    noise = standard_normal((len(latent), CREATIVE_WIDTH), rng)
    return latent @ taste.creative + CREATIVE_NOISE * noise
