"""One day of everybody's life."""

from dataclasses import replace

import numpy as np

from etl.sources.simulator import ads, organic, outcomes, reactions
from etl.sources.simulator.columns import ABSENT, Bools, Events, Ints, numbers
from etl.sources.simulator.config import Stream
from etl.sources.simulator.outcomes import Truth
from etl.sources.simulator.sessions import Sessions, draw_sessions, walk
from etl.sources.simulator.world import World


def live(world: World, day: int, room: Ints) -> tuple[Events, Truth]:
    """What happens in the sessions that start on one day, and the purchases of that day.

    `room` (users,) is how many events the sessions of each user may still cause: the first
    session that would pass it does not take place, nor does any after it on that day. The truth
    returned covers the impressions of these too.
    """
    rng = world.config.rng(Stream.BEHAVIOUR, day)
    sessions = draw_sessions(world, day, rng)
    steps = walk(sessions, rng)
    shown = ads.serve(world, day, sessions, steps, rng)
    impressions = ads.impression_events(sessions, shown)
    chances = outcomes.chances(world, sessions, shown)
    events = Events.concat([
        *organic.browse(world, sessions, steps, rng),
        impressions,
        *reactions.react(world, impressions, chances, rng),
        organic.buy(world, day, rng),
    ])  # fmt: skip
    truth = outcomes.truth(world, shown, chances)

    takes_place = _takes_place(sessions, events, room)
    events = events.take(np.append(takes_place, True)[events.session])  # ABSENT is the last
    return replace(events, event=numbers(day, len(events))), truth


def _takes_place(sessions: Sessions, events: Events, room: Ints) -> Bools:
    """(sessions,) whether the events of the user's sessions so far today fit the room."""
    size = np.bincount(events.session[events.session != ABSENT], minlength=len(sessions))
    until = np.cumsum(size)
    before = (until - size)[np.searchsorted(sessions.user, sessions.user)]
    return until - before <= room[sessions.user]
