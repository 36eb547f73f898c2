"""The equations: how likely each outcome of an impression is."""

from dataclasses import dataclass

import numpy as np

from etl.sources.simulator.ads import Impressions
from etl.sources.simulator.choice import sigmoid
from etl.sources.simulator.columns import Columns, Floats, Ints
from etl.sources.simulator.config import DAY_MS
from etl.sources.simulator.sessions import Sessions
from etl.sources.simulator.users import TIER
from etl.sources.simulator.vocabulary import SALES, VIDEO, WIFI
from etl.sources.simulator.world import World

# Rows: feed, reels, messaging. Columns: image, video, carousel, story.
FORMAT_ON_SURFACE = np.array([[0.2, 0.0, 0.3, -0.3], [-0.5, 0.5, -0.3, 0.4], [0.3, -0.4, 0.1, 0.2]])
# Rows: android, ios, web.
FORMAT_ON_DEVICE = np.array([[0.0, 0.1, -0.1, 0.1], [0.0, 0.1, 0.1, 0.1], [0.2, -0.2, 0.2, -0.4]])

CLICK_BIAS = np.array([-3.6, -4.05, -2.85])  # by surface
CLICK_POSITION = np.array([-0.18, -0.30, -0.10])  # by surface
CLICK_AFFINITY, CLICK_INTENT, CLICK_NEED = 0.8, 0.8, 2.3

LONG_BIAS = np.array([-2.2, -1.8, -2.4])  # by surface
LONG_POSITION = -0.12
LONG_AFFINITY, LONG_VIDEO, LONG_SLOW_VIDEO, LONG_NEED = 1.3, 0.7, -0.4, 0.4
LONG_QUALITY, LONG_CLICKINESS = 0.5, 0.4

CONVERSION_BIAS, CONVERSION_NEED, CONVERSION_AFFINITY = -3.5, 2.0, 0.3
CONVERSION_SALES, CONVERSION_TIER, CONVERSION_PRICE = 0.7, 0.3, -0.3

ATTRIBUTION_WINDOW_MS = 3 * DAY_MS
MEAN_DELAY_MS, LONGEST_DELAY_MS = 1 * DAY_MS, 5 * DAY_MS


@dataclass(frozen=True)
class Chances(Columns):
    """(n,) probabilities of the outcomes of impressions; a conversion needs the click."""

    click: Floats
    long_view: Floats
    conversion_given_click: Floats


@dataclass(frozen=True)
class Truth(Columns):
    """What only the simulator knows about impressions.

    impression      (n,)  number
    event_time      (n,)  epoch ms
    p_click, p_long_view  (n,)
    p_conversion    (n,)  of a click and a conversion within the attribution window
    expected_value  (n,)  money: the bid times the probability of the event that it pays for
    """

    impression: Ints
    event_time: Ints
    p_click: Floats
    p_long_view: Floats
    p_conversion: Floats
    expected_value: Floats


def chances(world: World, sessions: Sessions, shown: Impressions) -> Chances:
    """The probabilities of all outcomes of the impressions."""
    visit, ad = sessions.take(shown.session), world.ads.take(shown.ad)
    users = world.users.take(visit.user)
    s, f = visit.surface, ad.format
    need = world.cycles.need(world.taste, visit.user, ad.category, shown.time_ms)
    video = f == VIDEO
    click = (
        CLICK_BIAS[s]
        + CLICK_AFFINITY * shown.affinity
        + CLICK_POSITION[s] * shown.position
        + CLICK_INTENT * (visit.intent == ad.category)
        + CLICK_NEED * need
        + FORMAT_ON_SURFACE[s, f]
        + FORMAT_ON_DEVICE[visit.device, f]
        + ad.quality
        + users.clickiness
    )
    long_view = (
        LONG_BIAS[s]
        + LONG_AFFINITY * shown.affinity
        + LONG_POSITION * shown.position
        + LONG_NEED * need
        + LONG_VIDEO * video
        + LONG_SLOW_VIDEO * (video & (visit.connection != WIFI))
        + LONG_QUALITY * ad.quality
        + LONG_CLICKINESS * users.clickiness
    )
    conversion = (
        CONVERSION_BIAS
        + CONVERSION_AFFINITY * shown.affinity
        + CONVERSION_NEED * need
        + CONVERSION_SALES * (ad.goal == SALES)
        + CONVERSION_TIER * users.attributes[:, TIER]
        + CONVERSION_PRICE * (np.log(world.taste.price[ad.category]) - 3)
        + ad.trust
    )
    return Chances(sigmoid(click), sigmoid(long_view), sigmoid(conversion))


def truth(world: World, shown: Impressions, chance: Chances) -> Truth:
    """What a perfect model would say of the impressions."""
    in_time = delay_cdf(ATTRIBUTION_WINDOW_MS)
    conversion = chance.click * chance.conversion_given_click * in_time
    by_goal = np.stack([chance.long_view, chance.click, conversion])
    goal = world.ads.goal[shown.ad]
    return Truth(
        impression=shown.number,
        event_time=shown.time_ms,
        p_click=chance.click,
        p_long_view=chance.long_view,
        p_conversion=conversion,
        expected_value=world.ads.bid[shown.ad] * by_goal[goal, np.arange(len(shown))],
    )


def delay_cdf(delay_ms: float) -> float:
    """Probability that a conversion comes within a delay: exponential, cut at the longest."""
    return float(np.expm1(-delay_ms / MEAN_DELAY_MS) / np.expm1(-LONGEST_DELAY_MS / MEAN_DELAY_MS))


def draw_delays(count: int, rng: np.random.Generator) -> Ints:
    """(count,) delays from click to conversion, ms, at least one: the inverse of `delay_cdf`."""
    cut = np.expm1(-LONGEST_DELAY_MS / MEAN_DELAY_MS)
    delay_ms = -MEAN_DELAY_MS * np.log1p(rng.random(count) * cut)
    return np.ceil(delay_ms).astype(np.int64)
