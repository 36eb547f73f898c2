"""What can be shown: organic posts, which stay, and ads, which live a few days."""

from dataclasses import dataclass

import numpy as np

from etl.sources.simulator.columns import Columns, Floats, Ints
from etl.sources.simulator.config import DAY_MS, SimulatorConfig
from etl.sources.simulator.taste import CREATIVE_WIDTH, DIMENSIONS, Taste, blend, gaussian
from etl.sources.simulator.vocabulary import FORMATS, GOALS

SHARED_BY_CATEGORY = 0.65  # share of the variance of latents due to the category
CREATIVE_NOISE = 0.5
SHORTEST_LIFE_DAYS, LONGEST_LIFE_DAYS = 3, 7
ADVERTISER_SPREAD = 0.4
AD_SPREAD = 0.3
BID_BY_GOAL = np.array([0.02, 0.10, 0.80])  # money per long view, click, conversion
BID_SPREAD = 0.5


@dataclass(frozen=True)
class Items(Columns):
    """One row an item, posts or ads; n rows, D the width of the taste space.

    item        (n,)     number
    category    (n,)     number
    format      (n,)     position in FORMATS
    latent      (n, D)   what the item is about
    creative    (n, 16)  what can be seen of that: a noisy linear map of it
    created_ms  (n,)     epoch ms, before `first_day`
    first_day   (n,)     day of the run from which it can be shown
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
    """Items that somebody pays for.

    advertiser  (n,)  number
    goal        (n,)  position in GOALS
    bid         (n,)  money per event of the goal
    quality     (n,)  logit of a click
    trust       (n,)  logit of a conversion, one value an advertiser
    last_day    (n,)  last day of the run on which it can be shown
    """

    advertiser: Ints
    goal: Ints
    bid: Floats
    quality: Floats
    trust: Floats
    last_day: Ints

    def live(self, day: int) -> Ints:
        """Positions of the ads that can be shown on a day."""
        return np.flatnonzero((self.first_day <= day) & (day <= self.last_day))


def draw_posts(config: SimulatorConfig, taste: Taste, rng: np.random.Generator) -> Items:
    """The posts: all older than the run, in category `item % categories`."""
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


def draw_ads(config: SimulatorConfig, taste: Taste, rng: np.random.Generator) -> Ads:
    """Every ad of the run, each created on the day before its first.

    An advertiser sells in one category. The ads of the first day are in the middle of their lives.
    """
    arrivals = [config.ads_start] + [config.ads_per_day] * (config.days - 1)
    first_day = np.repeat(np.arange(config.days), arrivals)
    n = config.ads
    life = rng.integers(SHORTEST_LIFE_DAYS, LONGEST_LIFE_DAYS + 1, size=n)
    age = np.where(first_day == 0, rng.integers(life), 0)
    advertiser = rng.integers(config.advertisers, size=n)
    repute, trust = ADVERTISER_SPREAD * rng.standard_normal((2, config.advertisers))
    category = advertiser % config.categories
    goal = rng.integers(len(GOALS), size=n)
    latent = _latent(taste, category, rng)
    born_ms = config.start_ms + (first_day - age - 1) * DAY_MS
    return Ads(
        item=np.arange(n),
        category=category,
        format=rng.integers(len(FORMATS), size=n),
        latent=latent,
        creative=_creative(taste, latent, rng),
        created_ms=born_ms + rng.integers(DAY_MS, size=n),
        first_day=first_day,
        advertiser=advertiser,
        goal=goal,
        bid=BID_BY_GOAL[goal] * np.exp(BID_SPREAD * rng.standard_normal(n)),
        quality=repute[advertiser] + AD_SPREAD * rng.standard_normal(n),
        trust=trust[advertiser],
        last_day=first_day - age + life - 1,
    )


def _latent(taste: Taste, category: Ints, rng: np.random.Generator) -> Floats:
    own = gaussian((category.size, DIMENSIONS), rng)
    return blend(SHARED_BY_CATEGORY, taste.category[category], own)


def _creative(taste: Taste, latent: Floats, rng: np.random.Generator) -> Floats:
    noise = gaussian((len(latent), CREATIVE_WIDTH), rng)
    return latent @ taste.creative + CREATIVE_NOISE * noise
