"""When people come, where, what for, and the steps that they take."""

from dataclasses import dataclass

import numpy as np

from etl.sources.simulator.choice import draw_from_shares, draw_one
from etl.sources.simulator.columns import Bools, Columns, Ints
from etl.sources.simulator.config import HOUR_MS, SECOND_MS
from etl.sources.simulator.vocabulary import CONNECTIONS, DEVICES
from etl.sources.simulator.world import World

STEPS_PER_SESSION = 16
EVENTS_PER_STEP = 1.75  # a step's own event and what follows from it, on average
REQUEST_RATE = np.array([0.095, 0.12, 0.14])  # share of steps that ask for ads, by surface
RUSH_HOURS = np.array([8.0, 12.5, 20.0])
RUSH_SHARES = np.array([0.25, 0.25, 0.5])
RUSH_SPREAD_HOURS = 2.5
GAP_MEDIAN_MS, GAP_SPREAD = 12 * SECOND_MS, 0.9
INTENT_TASTE = 1.0  # how much sessions are about the categories that the user likes
USUAL_DEVICE = 0.85


@dataclass(frozen=True)
class Sessions(Columns):
    """One row a session, ordered by user, then by start.

    user, surface, intent (the category browsed), device, connection  (n,)  numbers
    start_ms  (n,)  epoch ms
    steps     (n,)  how many
    """

    user: Ints
    surface: Ints
    intent: Ints
    device: Ints
    connection: Ints
    start_ms: Ints
    steps: Ints


@dataclass(frozen=True)
class Steps(Columns):
    """One row a step of a session: a look at one post, or a request for ads.

    session   (n,)  position in the sessions
    time_ms   (n,)  epoch ms
    gap_ms    (n,)  time until the next step
    request   (n,)  whether ads are asked for
    """

    session: Ints
    time_ms: Ints
    gap_ms: Ints
    request: Bools


def draw_sessions(world: World, day: int, rng: np.random.Generator) -> Sessions:
    """The sessions that start on one day, as many as the users' activity asks for."""
    users = world.users
    count = rng.poisson(world.browsing / (STEPS_PER_SESSION * EVENTS_PER_STEP))
    user = np.repeat(users.user, count)
    n = user.size
    rush = rng.choice(RUSH_HOURS, p=RUSH_SHARES, size=n)
    hour = (rush + RUSH_SPREAD_HOURS * rng.standard_normal(n)) % 24
    start_ms = world.config.day_ms(day) + (hour * HOUR_MS).astype(np.int64)
    other = rng.random(n) > USUAL_DEVICE
    return Sessions(
        user=user,
        surface=draw_from_shares(users.surfaces[user], rng),
        intent=draw_one(INTENT_TASTE * users.liking(world.taste)[user], rng),
        device=np.where(other, rng.integers(len(DEVICES), size=n), users.device[user]),
        connection=rng.integers(len(CONNECTIONS), size=n),
        start_ms=start_ms,
        steps=rng.geometric(1 / STEPS_PER_SESSION, size=n),
    ).take(np.lexsort((start_ms, user)))


def walk(sessions: Sessions, rng: np.random.Generator) -> Steps:
    """The steps of all sessions, session by session, in the order of time."""
    session = np.repeat(np.arange(len(sessions)), sessions.steps)
    n = session.size
    gap_ms = SECOND_MS + (GAP_MEDIAN_MS * rng.lognormal(0, GAP_SPREAD, size=n)).astype(np.int64)
    clock = np.cumsum(gap_ms) - gap_ms
    first = np.cumsum(sessions.steps) - sessions.steps
    return Steps(
        session=session,
        time_ms=sessions.start_ms[session] + clock - clock[first][session],
        gap_ms=gap_ms,
        request=rng.random(n) < REQUEST_RATE[sessions.surface[session]],
    )
