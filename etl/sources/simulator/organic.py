"""What people do with posts: affinity chooses, holds the eye and earns likes."""

import numpy as np

from etl.sources.simulator.choice import draw_from_shares, draw_one, draw_yes
from etl.sources.simulator.columns import Events
from etl.sources.simulator.config import SECOND_MS
from etl.sources.simulator.sessions import Sessions, Steps
from etl.sources.simulator.vocabulary import EventType
from etl.sources.simulator.world import World

POOL = 12  # posts among which each step chooses
AFFINITY = 1.3
INTENT = 1.5
DWELL_MEDIAN_MS, DWELL_AFFINITY, DWELL_SPREAD = 4 * SECOND_MS, 0.4, 0.6
LIKE_BIAS, LIKE_AFFINITY = -3.4, 1.0
MESSAGE_BIAS, MESSAGE_AFFINITY = np.array([-4.5, -4.0, -0.5]), 0.5  # by surface


def browse(
    world: World, sessions: Sessions, steps: Steps, rng: np.random.Generator
) -> list[Events]:
    """Views, likes and messages of the steps that ask for no ads."""
    steps = steps.take(~steps.request)
    visit = sessions.take(steps.session)
    pool = rng.integers(len(world.posts), size=(len(steps), POOL))
    interest = world.users.interest(world.taste)[visit.user]
    affinity = world.taste.affinity(interest, visit.surface, world.posts.latent[pool])
    wanted = world.posts.category[pool] == visit.intent[:, None]
    chosen = draw_one(AFFINITY * affinity + INTENT * wanted, rng)[:, None]
    liking = np.take_along_axis(affinity, chosen, axis=1)[:, 0]

    noise = DWELL_SPREAD * rng.standard_normal(len(steps))
    dwell = DWELL_MEDIAN_MS * np.exp(DWELL_AFFINITY * liking + noise)
    dwell_ms = np.minimum(dwell.astype(np.int64), steps.gap_ms)
    like = draw_yes(LIKE_BIAS + LIKE_AFFINITY * liking, rng)
    message = draw_yes(MESSAGE_BIAS[visit.surface] + MESSAGE_AFFINITY * liking, rng)
    views = Events.of(
        EventType.POST_VIEW,
        session=steps.session,
        user=visit.user,
        item=np.take_along_axis(pool, chosen, axis=1)[:, 0],
        surface=visit.surface,
        event_time=steps.time_ms,
        dwell_ms=dwell_ms,
    )
    return [
        views,
        views.take(like).followed_by(EventType.POST_LIKE, dwell_ms[like] // 2),
        views.take(message).followed_by(EventType.MESSAGE_SENT, dwell_ms[message]),
    ]


def buy(world: World, day: int, rng: np.random.Generator) -> Events:
    """The purchases of one day, each of some post in the category that was due."""
    config = world.config
    user, category, time_ms = world.cycles.purchases(config.day_ms(day), config.day_ms(day + 1))
    shelf = rng.integers(config.posts // config.categories, size=user.size)
    return Events.of(
        EventType.POST_PURCHASE,
        user=user,
        item=category + config.categories * shelf,
        surface=draw_from_shares(world.users.surfaces[user], rng),
        event_time=time_ms,
        value=world.taste.basket(category, rng),
    )
