"""Ad requests, and the policy that answers them."""

from dataclasses import dataclass

import numpy as np

from etl.sources.simulator.choice import draw_in_order
from etl.sources.simulator.columns import Columns, Events, Floats, Ints, numbers
from etl.sources.simulator.sessions import Sessions, Steps
from etl.sources.simulator.vocabulary import EventType
from etl.sources.simulator.world import World

CANDIDATES = 12
MOST_SLOTS = np.array([6, 5, 4])  # by surface
POLICY_SHARPNESS = 1.5
POLICY_ERROR = 0.6  # sigma of what the policy gets wrong about affinity


@dataclass(frozen=True)
class Impressions(Columns):
    """One row an ad shown, ordered by session, then by request, then by position.

    number, request  (n,)  unique over the run
    session          (n,)  position in the sessions
    ad, position     (n,)  numbers
    time_ms          (n,)  epoch ms
    propensity       (n,)  probability with which this ad was drawn for this slot
    affinity         (n,)  how much the user likes it on this surface
    """

    number: Ints
    request: Ints
    session: Ints
    ad: Ints
    position: Ints
    time_ms: Ints
    propensity: Floats
    affinity: Floats


def serve(
    world: World, day: int, sessions: Sessions, steps: Steps, rng: np.random.Generator
) -> Impressions:
    """Fill the slots of every request, one after another, from the same candidates.

    Each draw is from the softmax of a noisy estimate of affinity, without return.
    """
    requests = steps.take(steps.request)
    visit = sessions.take(requests.session)
    candidate = _candidates(world.ads.live(day), len(requests), rng)
    interest = world.users.interest(world.taste)[visit.user]
    affinity = world.taste.affinity(interest, visit.surface, world.ads.latent[candidate])
    estimate = affinity + POLICY_ERROR * rng.standard_normal(affinity.shape)
    order, propensity = draw_in_order(POLICY_SHARPNESS * estimate, rng)

    slots = rng.integers(1, MOST_SLOTS[visit.surface] + 1)
    request, position = np.nonzero(np.arange(CANDIDATES) < slots[:, None])
    drawn = order[request, position]
    return Impressions(
        number=numbers(day, request.size),
        request=numbers(day, len(requests))[request],
        session=requests.session[request],
        ad=candidate[request, drawn],
        position=position,
        time_ms=requests.time_ms[request],
        propensity=propensity[request, position].astype(np.float32),
        affinity=affinity[request, drawn],
    )


def _candidates(live: Ints, requests: int, rng: np.random.Generator) -> Ints:
    """(requests, CANDIDATES) different live ads: one from each stratum of a shuffled list."""
    edges = np.linspace(0, live.size, CANDIDATES + 1).astype(np.int64)
    return rng.permutation(live)[rng.integers(edges[:-1], edges[1:], (requests, CANDIDATES))]


def impression_events(sessions: Sessions, shown: Impressions) -> Events:
    """The records of the impressions."""
    visit = sessions.take(shown.session)
    return Events.of(
        EventType.AD_IMPRESSION,
        session=shown.session,
        user=visit.user,
        item=shown.ad,
        surface=visit.surface,
        event_time=shown.time_ms,
        request=shown.request,
        impression=shown.number,
        position=shown.position,
        propensity=shown.propensity,
        device=visit.device,
        connection=visit.connection,
    )
