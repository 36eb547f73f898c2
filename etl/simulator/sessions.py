"""Sessions of users (when, on which surface, with which intent) and their steps."""

from dataclasses import dataclass

import numpy as np

from etl.array_types import Bools, Int64
from etl.simulator.arrays import RowBatch, draw_categorical, draw_from_probabilities
from etl.simulator.config import CONNECTIONS, DEVICES, HOUR_MS, SECOND_MS
from etl.simulator.world import World

STEPS_PER_SESSION = 16
EVENTS_PER_STEP = 1.75  # average number of events that a step causes
AD_REQUEST_RATE = np.array([0.095, 0.12, 0.14])  # share of steps that request ads, by surface
PEAK_HOURS = np.array([8.0, 12.5, 20.0])
PEAK_SHARES = np.array([0.25, 0.25, 0.5])
PEAK_SPREAD_HOURS = 2.5
GAP_MEDIAN_MS, GAP_SPREAD = 12 * SECOND_MS, 0.9
INTENT_AFFINITY_WEIGHT = 1.0  # how much the intent depends on the affinity with categories
PRIMARY_DEVICE_RATE = 0.85


@dataclass(frozen=True)
class Sessions(RowBatch):
    """One row per session, ordered by user, then by start.

    Attributes:
        user, surface, device, connection: (n,) row of the user, positions in the tuples of values.
        intent: (n,) category that the user browses.
        start_ms: (n,) epoch ms.
        step_count: (n,) number of steps.
    """

    user: Int64
    surface: Int64
    intent: Int64
    device: Int64
    connection: Int64
    start_ms: Int64
    step_count: Int64


@dataclass(frozen=True)
class Steps(RowBatch):
    """One row per step of a session: a view of one post, or an ad request.

    Attributes:
        session: (n,) row of the session.
        time_ms: (n,) epoch ms.
        gap_ms: (n,) time until the next step.
        is_ad_request: (n,) whether ads are requested.
    """

    session: Int64
    time_ms: Int64
    gap_ms: Int64
    is_ad_request: Bools


def draw_sessions(world: World, day: int, rng: np.random.Generator) -> Sessions:
    """Draw the sessions that start on one day; their number follows the activity of the users."""
    users = world.users
    count = rng.poisson(world.expected_daily_events / (STEPS_PER_SESSION * EVENTS_PER_STEP))
    user = np.repeat(users.user, count)
    n = user.size
    peak_hour = rng.choice(PEAK_HOURS, p=PEAK_SHARES, size=n)
    hour = (peak_hour + PEAK_SPREAD_HOURS * rng.standard_normal(n)) % 24
    start_ms = world.config.day_start_ms(day) + (hour * HOUR_MS).astype(np.int64)
    uses_other_device = rng.random(n) > PRIMARY_DEVICE_RATE
    return Sessions(
        user=user,
        surface=draw_from_probabilities(users.surfaces[user], rng),
        intent=draw_categorical(
            INTENT_AFFINITY_WEIGHT * users.category_affinity(world.taste)[user], rng
        ),
        device=np.where(uses_other_device, rng.integers(len(DEVICES), size=n), users.device[user]),
        connection=rng.integers(len(CONNECTIONS), size=n),
        start_ms=start_ms,
        step_count=rng.geometric(1 / STEPS_PER_SESSION, size=n),
    ).take(np.lexsort((start_ms, user)))


def draw_steps(sessions: Sessions, rng: np.random.Generator) -> Steps:
    """Draw the steps of all sessions, session by session in the order of time."""
    session = np.repeat(np.arange(len(sessions)), sessions.step_count)
    n = session.size
    gap_ms = SECOND_MS + (GAP_MEDIAN_MS * rng.lognormal(0, GAP_SPREAD, size=n)).astype(np.int64)
    elapsed_ms = np.cumsum(gap_ms) - gap_ms
    first_step = np.cumsum(sessions.step_count) - sessions.step_count
    return Steps(
        session=session,
        time_ms=sessions.start_ms[session] + elapsed_ms - elapsed_ms[first_step][session],
        gap_ms=gap_ms,
        is_ad_request=rng.random(n) < AD_REQUEST_RATE[sessions.surface[session]],
    )
