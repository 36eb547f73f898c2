"""What the outcomes of impressions leave in the logs."""

import numpy as np

from etl.sources.simulator.columns import Bools, Events, Ints
from etl.sources.simulator.config import SECOND_MS
from etl.sources.simulator.outcomes import Chances, draw_delays
from etl.sources.simulator.vocabulary import EventType
from etl.sources.simulator.world import World

LONG_VIEW_MS = 5 * SECOND_MS  # a view is long from here on
LONG_TAIL = 0.8  # mean of what a long view adds, in LONG_VIEW_MS
SHORTEST_VIEW_MS = 500  # a glance under this is logged as no view


def react(
    world: World, impressions: Events, chances: Chances, rng: np.random.Generator
) -> list[Events]:
    """Draw the outcomes of the impressions; returns their records, impressions not included."""
    n = len(impressions)
    is_long = rng.random(n) < chances.long_view
    is_click = rng.random(n) < chances.click
    dwell_ms = _dwell_ms(is_long, rng)
    is_view = is_click | (dwell_ms >= SHORTEST_VIEW_MS)
    click_ms = np.ceil(dwell_ms * rng.random(n)).astype(np.int64)
    buys = is_click & (rng.random(n) < chances.conversion_given_click)

    def after(kind: EventType, happens: Bools, delay_ms: Ints) -> Events:
        shown = impressions.take(happens)
        return shown.followed_by(kind, delay_ms[happens], impression=shown.impression)

    viewed = impressions.take(is_view)
    buyers = impressions.take(buys)
    return [
        viewed.followed_by(
            EventType.AD_VIEW,
            dwell_ms[is_view],
            impression=viewed.impression,
            dwell_ms=dwell_ms[is_view],
        ),
        after(EventType.AD_LONG_VIEW, is_long, np.full(n, LONG_VIEW_MS)),
        after(EventType.AD_CLICK, is_click, click_ms),
        buyers.followed_by(
            EventType.CONVERSION,
            click_ms[buys] + draw_delays(len(buyers), rng),
            value=world.taste.basket(world.ads.category[buyers.item], rng),
        ),
    ]


def _dwell_ms(is_long: Bools, rng: np.random.Generator) -> Ints:
    """Time spent on each ad: at least LONG_VIEW_MS in a long view, less in the others."""
    long = 1 + LONG_TAIL * rng.standard_exponential(is_long.size)
    short = rng.random(is_long.size) ** 2
    return np.floor(LONG_VIEW_MS * np.where(is_long, long, short)).astype(np.int64)
