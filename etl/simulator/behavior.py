"""Events of users: views, likes and messages of posts, purchases, and outcomes of impressions.

Affinity determines which post a user views, for how long, and whether they like it.
"""

from dataclasses import replace
from typing import cast

import numpy as np

from etl.array_types import Bools, Int64
from etl.simulator.ads import OutcomeProbabilities, draw_delays
from etl.simulator.arrays import Events, draw_bernoulli, draw_categorical, draw_from_probabilities
from etl.simulator.config import SECOND_MS, EventType
from etl.simulator.sessions import Sessions, Steps
from etl.simulator.world import World

CANDIDATE_POSTS = 12  # posts among which each step chooses
CHOICE_AFFINITY_WEIGHT = 1.3
CHOICE_INTENT_WEIGHT = 1.5
DWELL_MEDIAN_MS, DWELL_AFFINITY, DWELL_SPREAD = 4 * SECOND_MS, 0.4, 0.6
LIKE_BIAS, LIKE_AFFINITY = -3.4, 1.0
MESSAGE_BIAS, MESSAGE_AFFINITY = np.array([-4.5, -4.0, -0.5]), 0.5  # by surface


def draw_organic_events(
    world: World, sessions: Sessions, steps: Steps, rng: np.random.Generator
) -> list[Events]:
    """Views, likes and messages of the steps that are not ad requests."""
    steps = steps.take(~steps.is_ad_request)
    session = sessions.take(steps.session)
    candidates = rng.integers(len(world.posts), size=(len(steps), CANDIDATE_POSTS))
    interest = world.users.interest(world.taste)[session.user]
    affinity = world.taste.affinity(interest, session.surface, world.posts.latent[candidates])
    is_intended = world.posts.category[candidates] == session.intent[:, None]
    logits = CHOICE_AFFINITY_WEIGHT * affinity + CHOICE_INTENT_WEIGHT * is_intended
    choice = draw_categorical(logits, rng)[:, None]
    affinity = np.take_along_axis(affinity, choice, axis=1)[:, 0]

    noise = DWELL_SPREAD * rng.standard_normal(len(steps))
    dwell = DWELL_MEDIAN_MS * np.exp(DWELL_AFFINITY * affinity + noise)
    dwell_ms = np.minimum(dwell.astype(np.int64), steps.gap_ms)
    is_reaction = draw_bernoulli(LIKE_BIAS + LIKE_AFFINITY * affinity, rng)
    is_sent = draw_bernoulli(MESSAGE_BIAS[session.surface] + MESSAGE_AFFINITY * affinity, rng)
    views = Events.of_type(
        EventType.POST_VIEW,
        session=steps.session,
        user=session.user,
        item=np.take_along_axis(candidates, choice, axis=1)[:, 0],
        surface=session.surface,
        event_time=steps.time_ms,
        dwell_ms=dwell_ms,
    )
    return [
        views,
        views.take(is_reaction).follow_up(EventType.POST_LIKE, dwell_ms[is_reaction] // 2),
        views.take(is_sent).follow_up(EventType.MESSAGE_SENT, dwell_ms[is_sent]),
    ]


def draw_purchases(world: World, day: int, rng: np.random.Generator) -> Events:
    """The purchases of one day, each of a random post in the category that was due."""
    config = world.config
    user, category, time_ms = world.cycles.purchases_between(
        config.day_start_ms(day), config.day_start_ms(day + 1)
    )
    # Post i is in category i % categories.
    post_in_category = rng.integers(config.posts // config.categories, size=user.size)
    return Events.of_type(
        EventType.POST_PURCHASE,
        user=user,
        item=category + config.categories * post_in_category,
        surface=draw_from_probabilities(world.users.surfaces[user], rng),
        event_time=time_ms,
        value=world.taste.purchase_values(category, rng),
    )


LONG_VIEW_THRESHOLD_MS = 5 * SECOND_MS  # shortest dwell time of a long view
LONG_VIEW_TAIL_MEAN = 0.8  # mean dwell time above the threshold, as a multiple of it
MIN_VIEW_MS = 500  # shorter views are not logged


def draw_outcome_events(
    world: World, impressions: Events, probabilities: OutcomeProbabilities, rng: np.random.Generator
) -> list[Events]:
    """Draw the outcomes of the impressions; returns their records, without the impressions."""
    n = len(impressions)
    is_long = rng.random(n) < probabilities.long_view
    is_click = rng.random(n) < probabilities.click
    dwell_ms = _dwell_ms(is_long, rng)
    is_view = is_click | (dwell_ms >= MIN_VIEW_MS)
    click_ms = np.ceil(dwell_ms * rng.random(n)).astype(np.int64)
    is_conversion = is_click & (rng.random(n) < probabilities.conversion_given_click)

    def outcomes(event_type: EventType, occurs: Bools, delay_ms: Int64) -> Events:
        parents = impressions.take(occurs)
        return parents.follow_up(event_type, delay_ms[occurs], impression=parents.impression)

    views = outcomes(EventType.AD_VIEW, is_view, dwell_ms)
    converted = impressions.take(is_conversion)
    return [
        replace(views, dwell_ms=dwell_ms[is_view]),
        outcomes(EventType.AD_LONG_VIEW, is_long, np.full(n, LONG_VIEW_THRESHOLD_MS)),
        outcomes(EventType.AD_CLICK, is_click, click_ms),
        converted.follow_up(
            EventType.CONVERSION,
            click_ms[is_conversion] + draw_delays(len(converted), rng),
            value=world.taste.purchase_values(world.ads.category[converted.item], rng),
        ),
    ]


def _dwell_ms(is_long: Bools, rng: np.random.Generator) -> Int64:
    """Dwell time of each ad, at least LONG_VIEW_THRESHOLD_MS for long views and less for others."""
    long = 1 + LONG_VIEW_TAIL_MEAN * rng.standard_exponential(is_long.size)
    short = rng.random(is_long.size) ** 2
    dwell_ms = np.floor(LONG_VIEW_THRESHOLD_MS * np.where(is_long, long, short))
    return cast(Int64, dwell_ms.astype(np.int64))
